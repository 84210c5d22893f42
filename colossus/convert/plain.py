"""`plain`: the model of an engine with its weights, for one process and in torch's own modules where torch has them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from colossus.comm.objects import all_gather_object
from colossus.construct.allocate import trace_constructor
from colossus.context.grid import RankGrid
from colossus.context.parallel_context import ParallelContext
from colossus.convert.layer_table import Row, row_of
from colossus.convert.module_hooks import hooks_of, take_mode_and_hooks
from colossus.layers.checkpointing import is_checkpointed
from colossus.layers.heads import ReplicatedKV
from colossus.layers.latent_attention import Down
from colossus.layers.layer import Layer
from colossus.layers.linear import Linear
from colossus.layers.model_parallel import model_parallel_of
from colossus.layout.parameter import logical_parameters, made_by_layer
from colossus.layout.parameter_hooks import copy_attributes, copy_hooks, is_of_colossus
from colossus.state.model_state_dict import full_state_dict, stream_state_dict

if TYPE_CHECKING:
    from colossus.engine.engine import Engine


def plain(engine: Engine, *, everywhere: bool = True) -> nn.Module | None:
    """Return the model of an engine as a plain ``torch.nn`` module with its weights, which runs in one process.

        model = colossus.plain(engine)          # on all ranks
        model.eval()(ids)

    Collective: all ranks call, between steps, under any plan. The modules are those of the model, copied as
    ``copy.deepcopy`` does. A layer of ours becomes torch's module where torch has it (`colossus.convert.layer_table`).
    Other layers are made for a context of one rank, in which they compute with plain torch and need no process group.
    So the result is trained, saved and copied as any module, also after the engine is closed. The state dict has the
    names and shapes of `full_state_dict`; tied parameters are one. Dropout keeps its rates (torch draws its masks),
    each module its mode, each parameter its dtype and ``requires_grad``. Activation checkpointing, and the hooks of
    colossus, are left out. Your hooks stay, on modules and on parameters, and so do attributes of parameters; under a
    pipeline only those of this stage.

    Memory: each rank that gets the model holds all of it beside its shards. With ``everywhere=False`` only rank 0 does,
    and the others hold one whole parameter at a time.

    Replicas with parameters of their own are averaged.

    Args:
        everywhere: return the model on every rank; else on rank 0, and None on the others.

    Returns:
        The module, on the device of the context.

    Raises:
        ValueError: on all ranks, for a layer of one's own with parameters, or a class derived from a fused `Linear`.
        TypeError: on all ranks, for a module that ``copy.deepcopy`` cannot copy.
    """
    model, context = engine.model, engine.context
    with engine.strategy.export():
        stages = _exchange_between_stages(model, context)
        copied = _Copy(model, context, stages).make()
        state = full_state_dict(model, context).items() if everywhere else stream_state_dict(model, context)
        _fill(copied, state, stages)  # on other ranks the stream is empty
    if not (everywhere or context.is_logging_rank):
        return None
    for logical in logical_parameters(model, keep_ties=True):
        parameter = copied.get_parameter(logical.name)
        copy_attributes(parameter, logical.parameter)
        if not logical.shard_name:
            copy_hooks(parameter, engine.store.computed(logical.parameter), logical.parameter)
    return copied


class _AllStages(NamedTuple):
    """The values of the whole model that stages of a pipeline exchange.

    Attributes:
        trains: name of a parameter -> ``requires_grad``.
        attributes: (name of a module, name of its attribute) -> a buffer outside the state dict, or another tensor in
            the module.
    """

    trains: dict[str, bool]
    attributes: dict[tuple[str, str], Tensor]


def _exchange_between_stages(model: nn.Module, context: ParallelContext) -> _AllStages:
    trains = {entry.name: entry.parameter.requires_grad for entry in logical_parameters(model, keep_ties=True)}
    state = model.state_dict(keep_vars=True)
    attributes: dict[tuple[str, str], Tensor] = {}
    for name, module in model.named_modules():
        buffers = {leaf: buffer for leaf, buffer in module._buffers.items() if _join(name, leaf) not in state}
        plain_tensors = {leaf: value for leaf, value in vars(module).items() if isinstance(value, Tensor)}
        for leaf, value in (buffers | plain_tensors).items():
            if value is not None and not value.is_meta:
                attributes[name, leaf] = value.detach()
    stages = _AllStages(trains, attributes)
    pipeline = context.group("pipeline")
    if pipeline.size > 1:
        on_host = {key: value.cpu() for key, value in attributes.items()}
        for of_trains, of_attributes in reversed(all_gather_object((trains, on_host), pipeline)):
            stages.trains.update(of_trains)
            stages.attributes.update({key: value.to(context.device) for key, value in of_attributes.items()})
    return stages


class FusedLinear(nn.ModuleDict):
    """Several linears of one input: name -> ``torch.nn.Linear``. Input [.., in_features]; a tuple of outputs."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(linear(x) for linear in self.values())


class _Copy:
    """A copy of a model in a context of one rank; parameters are on the meta device."""

    def __init__(self, model: nn.Module, context: ParallelContext, stages: _AllStages) -> None:
        self._model, self._parameters = model, stages.trains.keys()
        self._names = {id(module): name for name, module in model.named_modules()}
        grid = RankGrid(dict.fromkeys(context.grid.names, 1), context.grid.public)
        self._context = ParallelContext(grid, device=context.device, seed=context.rng.seed)
        #: the memo of `copy.deepcopy`: objects that are not copied, or have another copy
        self._memo: dict[int, Any] = {
            id(context): self._context,
            id(model_parallel_of(context)): model_parallel_of(self._context),
        }

    def make(self) -> nn.Module:
        for parameter in self._model.parameters():
            placeholder = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            self._memo[id(parameter)] = placeholder
        for module in self._model.modules():
            self._memo |= {
                id(hook): hook for hooks in hooks_of(module) for hook in hooks.values() if is_of_colossus(hook)
            }
        copied = self._convert(self._model)
        for module in copied.modules():
            _clean(module)
        return copied

    def _convert(self, module: nn.Module) -> nn.Module:
        """Return the one copy of a module."""
        if id(module) not in self._memo:
            if isinstance(module, Linear | ReplicatedKV) and module.is_fused:
                self._memo[id(module)] = self._fused(module)
                return self._memo[id(module)]
            for inner in module.children():  # deepcopy then finds them in the memo
                self._convert(inner)
            row = row_of(module)
            self._memo[id(module)] = self._copied(module) if row is None else self._of_row(module, row)
        converted: nn.Module = self._memo[id(module)]
        return converted

    def _of_row(self, module: nn.Module, row: Row) -> nn.Module:
        """Return torch's module if it computes what this layer does, else the layer, made for one rank."""
        name = self._names.get(id(module), "")

        def has(parameter: str) -> bool:
            return _join(name, parameter) in self._parameters

        if not _is_as_written(module, row.ours) or row.torch is None:
            return self._rebuilt(module, row, row.our_arguments(module, has))
        with torch.device("meta"):
            converted = row.torch(**row.torch_arguments(module, has))
        take_mode_and_hooks(converted, module)
        return converted

    def _fused(self, module: Linear | ReplicatedKV) -> nn.Module:
        name = self._names.get(id(module), "")
        if not _is_as_written(module, Linear, Down, ReplicatedKV):
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) is a fused Linear with a forward or parts of its "
                f"own: put the Linear into a module of yours instead"
            )
        with torch.device("meta"):
            linears = {
                output: nn.Linear(module.in_features, size, _join(name, output, "bias") in self._parameters)
                for output, size in module.outputs.items()
            }
        fused = FusedLinear(linears).train(module.training)
        take_mode_and_hooks(fused, module)
        return fused

    def _rebuilt(self, module: nn.Module, row: Row, arguments: Mapping[str, Any]) -> nn.Module:
        """Return a new layer for one rank, with the attributes that its class or a user added."""
        layer: Any = type(module).__new__(type(module))
        self._memo[id(module)] = layer
        with self._context:
            trace_constructor(lambda: row.ours.__init__(layer, **arguments), seed=0)
        for places in ("_parameters", "_buffers", "_modules"):
            own, theirs = vars(layer)[places], vars(module)[places]
            own.update({leaf: copy.deepcopy(theirs[leaf], self._memo) for leaf in theirs if leaf not in own})
        vars(layer).update(
            {key: copy.deepcopy(value, self._memo) for key, value in vars(module).items() if key not in vars(layer)}
        )
        layer.full_name = module.full_name
        take_mode_and_hooks(layer, module)
        return layer

    def _copied(self, module: nn.Module) -> nn.Module:
        own = [leaf for leaf, value in module._parameters.items() if value is not None and made_by_layer(value)]
        if isinstance(module, Layer) and own and not module.takes_plain_parameters:
            raise ValueError(
                f"{self._names.get(id(module)) or 'the model'} ({type(module).__name__}) makes {', '.join(own)} "
                f"itself, and has no row in convert/layer_table.py: put its parameters into a plain module of torch"
            )
        return copy.deepcopy(module, self._memo)


def _is_as_written(module: nn.Module, *kinds: type[Layer]) -> bool:
    """Return whether a module is exactly of one of these classes, with its forward and no further members."""
    replaced = "forward" in vars(module) and not is_checkpointed(module)
    expected = {"weight", "bias", *getattr(module, "outputs", ()), *getattr(module, "statistics", ())}
    members = {*module._modules, *module._buffers, *module._parameters}
    return type(module) in kinds and not replaced and members <= expected


def _clean(module: nn.Module) -> None:
    """Remove the hooks and attributes that colossus has put on a module."""
    for hooks in hooks_of(module):
        for key in [key for key, hook in hooks.items() if is_of_colossus(hook)]:
            del hooks[key]
    while "forward" in vars(module) and is_of_colossus(vars(module)["forward"]):
        replaced = vars(module).pop("forward")._replaced
        if replaced is not None:
            vars(module)["forward"] = replaced
    for leaf in [leaf for leaf in vars(module) if leaf.startswith("_colossus_")]:
        del vars(module)[leaf]


def _fill(copied: nn.Module, state: Iterable[tuple[str, Tensor]], stages: _AllStages) -> None:
    """Give a copy the values of parameters and buffers, and the attributes of all stages.

    Args:
        state: (name, whole tensor); a tied tensor comes under each of its names.
    """
    filled: dict[int, tuple[Tensor, Tensor]] = {}
    for name, whole in state:
        path, _, leaf = name.rpartition(".")
        module = copied.get_submodule(path)
        if id(whole) not in filled:
            filled[id(whole)] = whole, nn.Parameter(whole, stages.trains[name]) if name in stages.trains else whole
        places: dict[str, Any] = module._parameters if name in stages.trains else module._buffers
        places.pop(leaf, None)  # so that the entries are in the order of the whole model
        places[leaf] = filled[id(whole)][1]
    for (path, leaf), value in stages.attributes.items():
        module = copied.get_submodule(path)
        if not isinstance(getattr(module, leaf, None), Tensor) or getattr(module, leaf).is_meta:
            places = module._buffers if leaf in module._non_persistent_buffers_set else vars(module)
            places[leaf] = value


def _join(*parts: str) -> str:
    return ".".join(filter(None, parts))
