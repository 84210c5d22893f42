"""Build a model under a parallel context: on meta first, then every rank's own values."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from colossus.construct import allocate
from colossus.construct.init_trace import InitTrace
from colossus.construct.overlaps import check_overlaps
from colossus.construct.traced_value import traced_shards
from colossus.context.parallel_context import ParallelContext, current_context
from colossus.error_place import name_modules_of
from colossus.layout.parameter import ParameterSpec, made_by_layer, reference_prefixes, spec_of
from colossus.layout.parameter_hooks import share_hooks
from colossus.layout.split_parameter import as_shards, mark_split
from colossus.random import GLOBAL_RNG

#: torch's norms, with and without running statistics
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


class NamedModule(nn.Module):
    """Base of modules whose random streams and error messages need their full name.

    Attributes:
        full_name: name in the whole model, set by `colossus.build`; empty before, and for the model itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.full_name = ""

    def _load_from_state_dict(self, *args: Any) -> None:
        """Load what this rank holds of each parameter, as its `state_dict` gives it."""
        with as_shards():
            super()._load_from_state_dict(*args)


def build(
    factory: Callable[[], nn.Module],
    context: ParallelContext | None = None,
    *,
    dtype: torch.dtype | None = None,
    wide_dtype: torch.dtype | None = None,
    materialize: bool = True,
    draw: bool = True,
    prepare: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """Return the model that ``factory`` makes, with only this rank's shards.

    Initial values depend on the context's seed, the full name and the full shape of each parameter, not on the plan.
    That also holds for tensors that the constructor computes from others; computing one materialises all of its sources
    once. Inside the factory, Python's, numpy's and torch's global generators return the same numbers on every rank;
    their states are restored afterwards.

    Args:
        factory: a class or function without arguments.
        context: by default the current one.
        dtype: dtype of all floating-point parameters and buffers; by default the constructor's choice.
        wide_dtype: dtype of the buffers, of the parameters of norms and of those without a dim, if it differs: norms of
            torch take no parameters narrower than their statistics, and beside a tensor a scalar is just a number.
        materialize: False leaves everything on the meta device (to check sizes, or to count).
        draw: False leaves zeros in the parameters of our layers, for values that are loaded next.
        prepare: gets the whole model on the meta device, and may delete its parameters and buffers or set them to None:
            these are never materialised, and the values of the others do not change. It may also attach a `StoredSpec`
            to a parameter, of which only these rows are then drawn. See also `keep_attributes_on_meta`. A build inside
            a build ignores it.

    Raises:
        ValueError: the plan cannot split a size, `torch.nn.init` writes to a parameter of our layers, a module is lazy,
            or the constructor leaves a tensor that is no parameter, buffer or attribute of a module.
    """
    if allocate.is_building():
        return factory()  # the outer build does the rest
    context = context or current_context()
    with context, GLOBAL_RNG.preserved(context.rng.key("init", "numpy")):
        model, trace = allocate.trace_constructor(factory, context.rng.key("init", "constructor"))
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model factory returned a {type(model).__name__}, not a torch.nn.Module")
    _name_parts(model)
    check_overlaps(model, trace)
    materializer = _Materializer(trace, context, dtype, wide_dtype or dtype, draw=draw)
    materializer.references = reference_prefixes(model)
    if prepare is not None or materialize:
        replace_tensors(model, materializer.fix_seed)
    dropped = {} if prepare is None else _prepared(model, context, prepare)
    if materialize:
        materializer.keep_wide(model)
        replace_tensors(model, materializer.materialize, dropped)
        del materializer
        if not dropped:  # else a tensor may belong to a stage of another rank
            trace.require_nothing_hidden()
    return model


def _name_parts(model: nn.Module) -> None:
    """Set the full names of modules and parameters."""
    for name, module in model.named_modules():
        if isinstance(module, NamedModule):
            module.full_name = name
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(
                f"{name} gets its shape at the first forward pass (a lazy module): pass its sizes to the constructor"
            )
        spec = spec_of(parameter)
        spec.name = name
        _ = spec.subject  # made now, since an error also names the parameters that another rank uses
    name_modules_of(model)


def _prepared(model: nn.Module, context: ParallelContext, prepare: Callable[[nn.Module], None]) -> dict[int, Tensor]:
    """Run ``prepare`` and return, by id, the parameters and buffers that it has removed from the model."""
    before = _registered(model)
    with context:
        prepare(model)
    after = _registered(model)
    return {key: tensor for key, tensor in before.items() if key not in after}


def _registered(model: nn.Module) -> dict[int, Tensor]:
    return {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}


def replace_tensors(
    model: nn.Module, replace: Callable[[Tensor, str, str], Tensor], dropped: Container[int] = ()
) -> None:
    """Replace every tensor of a model by ``replace`` of it, once each, so that tied tensors stay tied.

    Parameters and buffers come first, then tensors on meta that are attributes of modules, or in lists, dicts and
    tuples of attributes.

    Args:
        replace: takes a tensor, the name of the first module that has it, and its name there.
        dropped: ids of tensors that stay as they are where attributes still refer to them.
    """
    modules = list(model.named_modules())
    places = [
        (module, path, leaf, tensor)
        for path, module in modules
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    ]
    for path, module in modules:
        if "_colossus_on_meta" not in vars(module):
            attributes = [(leaf, value) for leaf, value in vars(module).items() if isinstance(value, Tensor)]
            places += [(module, path, leaf, value) for leaf, value in attributes if value.is_meta]
    #: id of a tensor -> the tensor, kept so that no other object gets its id, and its replacement
    replaced: dict[int, tuple[Tensor, Tensor]] = {}

    def value_for(tensor: Tensor, path: str, leaf: str) -> Tensor:
        if id(tensor) in dropped:
            return tensor
        if id(tensor) not in replaced:
            replaced[id(tensor)] = tensor, replace(tensor, path, leaf)
        return replaced[id(tensor)][1]

    for module, path, leaf, tensor in places:
        if (value := value_for(tensor, path, leaf)) is not tensor:
            setattr(module, leaf, value)  # setattr, since a recurrent module of torch also has a list of its parameters
    for path, module in modules:
        for leaf, nest in [*vars(module).items()] if "_colossus_on_meta" not in vars(module) else ():
            if isinstance(nest, list | dict | tuple) and nest and leaf not in ("_parameters", "_buffers", "_modules"):
                vars(module)[leaf] = _replaced_inside(nest, path, leaf, value_for, set())


def _replaced_inside(
    nest: Any, path: str, name: str, replace: Callable[[Tensor, str, str], Tensor], seen: set[int]
) -> Any:
    """Return a nest of lists, dicts and tuples whose tensors on meta are replaced; lists and dicts stay the same."""
    if isinstance(nest, Tensor):
        return replace(nest, path, name) if nest.is_meta else nest
    if not isinstance(nest, list | dict | tuple) or id(nest) in seen:
        return nest
    seen.add(id(nest))
    entries = [*nest.items()] if isinstance(nest, dict) else [*enumerate(nest)]
    new = {key: _replaced_inside(value, path, f"{name}.{key}", replace, seen) for key, value in entries}
    changed = {key: new[key] for key, value in entries if new[key] is not value}
    if isinstance(nest, tuple):
        kind = getattr(type(nest), "_make", type(nest))  # a named tuple
        return kind(new.values()) if changed else nest
    for key, value in changed.items():
        nest[key] = value
    return nest


def wide_parameters(model: nn.Module) -> dict[int, nn.Parameter]:
    """Return, by id, the parameters of ``wide_dtype``: norms', scalars, and those that declare a wide storage."""
    norms = (part for part in model.modules() if isinstance(part, _NORMS) or getattr(type(part), "is_norm", False))
    wide = [param for norm in norms for param in norm.parameters(recurse=False)]
    for param in model.parameters():
        wide += [param] if not param.dim() or spec_of(param).computed_dtype is not None else []
    return {id(param): param for param in wide}


def keep_attributes_on_meta(module: nn.Module) -> None:
    """Leave tensors that are plain attributes of this module on meta; ``prepare`` may call it."""
    vars(module)["_colossus_on_meta"] = True


class _Materializer:
    """The replacement of tensors that a constructor left on the meta device by tensors with values."""

    def __init__(
        self,
        trace: InitTrace,
        context: ParallelContext,
        dtype: torch.dtype | None,
        wide_dtype: torch.dtype | None,
        *,
        draw: bool,
    ) -> None:
        self.trace, self.context, self.dtype, self.wide_dtype, self.draw = trace, context, dtype, wide_dtype, draw
        #: prefixes of models that begin with the values that they would have alone
        self.references: tuple[str, ...] = ()
        self._wide: dict[int, nn.Parameter] = {}

    def _key(self, *parts: str) -> int:
        """Return the key of initial values with a name in the whole model, or in a reference."""
        name = _join(*parts)
        prefix = next((prefix for prefix in self.references if name.startswith(prefix)), "")
        return self.context.rng.key("init", name.removeprefix(prefix))

    def keep_wide(self, model: nn.Module) -> None:
        """Record the parameters that are stored wide."""
        self._wide = wide_parameters(model)

    def fix_seed(self, tensor: Tensor, path: str, leaf: str) -> Tensor:
        """Give a recorded tensor the seed that it has in the whole model."""
        if tensor.is_meta and not made_by_layer(tensor):
            self.trace.fix_seed(tensor, self._key(path, leaf))
        for shard in traced_shards(tensor):
            shard.init.fix_seed(self._key(path, shard.name, leaf))
        return tensor

    def materialize(self, tensor: Tensor, path: str, leaf: str) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            return self._cast(self._traced_value(tensor), self.wide_dtype)
        spec, dtype = spec_of(tensor), self.wide_dtype if id(tensor) in self._wide else self.dtype
        if tensor.is_meta and not spec.is_plain:
            value = self._draw_shards(tensor, path, leaf, spec, dtype)
        else:
            value = self._cast(self._rows_to_store(self._traced_value(tensor), spec), dtype)
        if value is tensor:
            return tensor
        real = nn.Parameter(value.detach(), requires_grad=tensor.requires_grad)
        vars(real).update(vars(tensor))
        share_hooks(real, tensor)
        return mark_split(real)

    def _draw_shards(
        self, tensor: nn.Parameter, path: str, leaf: str, spec: ParameterSpec, dtype: torch.dtype | None
    ) -> Tensor:
        if not self.trace.is_sharded(tensor):
            raise ValueError(
                f"{_join(path, leaf)}: the constructor assigned other values (.data = ...), but a sharded parameter "
                f"draws its values from its name and full shape: pass init=... to the layer (see "
                f"colossus.layers.init)"
            )

        def key_of(shard_name: str) -> int:
            return self._key(path, shard_name, leaf)

        dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        shape = (spec.shards[-1].rows[1], *tensor.shape[1:])  # `prepare` may have cut its rows
        if self.draw:
            drawn = allocate.draw(spec, shape, self.context, key_of=key_of, dtype=dtype, device=self.context.device)
        else:
            drawn = torch.zeros(shape, dtype=dtype, device=self.context.device)
        for shard in traced_shards(tensor):
            shard.init.release()
        return drawn

    def _rows_to_store(self, whole: Tensor, spec: ParameterSpec) -> Tensor:
        """Return the rows of a plain parameter that this rank stores if `prepare` has cut them, else all."""
        if not spec.layout.stored:
            return whole
        (shard,) = spec.shards
        out = whole.new_zeros((shard.rows[1], *whole.shape[1:]))
        at = 0
        for (start, stop), *_ in spec.boxes(shard, self.context.grid.sizes, self.context.coordinates):
            out[at : at + stop - start] = whole[start:stop]
            at += stop - start
        return out

    def _traced_value(self, tensor: Tensor) -> Tensor:
        return self.trace.value(tensor)

    def _cast(self, value: Tensor, dtype: torch.dtype | None) -> Tensor:
        return value.to(self.context.device, dtype if value.is_floating_point() else None)


def _join(*parts: str) -> str:
    return ".".join(filter(None, parts))
