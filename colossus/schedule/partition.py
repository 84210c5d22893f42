"""The partition of a model into pipeline stages: the blocks of each stage, and the parameters of each rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from colossus.construct.build_model import keep_attributes_on_meta
from colossus.error_place import located_error
from colossus.layers.pipeline_block import NamedBlock, has_hooks, pipeline_blocks
from colossus.layout.parameter import record_full_order, spec_of
from colossus.schedule.bounds import Split, name_ranges, stage_bounds


@dataclass(frozen=True, eq=False)
class Partition:
    """A model split into stages.

    Attributes:
        blocks: the blocks of the whole model, in order.
        bounds: stage s runs ``blocks[bounds[s]:bounds[s + 1]]``.
        rank_of: stage -> index along the pipeline axis.
        stages_of: name of a parameter -> the stages that use it, ascending.
        sizes: name of a parameter -> number of elements of the whole parameter, in the order of the whole model.
    """

    blocks: tuple[NamedBlock, ...]
    bounds: tuple[int, ...]
    rank_of: Mapping[int, int]
    stages_of: Mapping[str, tuple[int, ...]]
    sizes: Mapping[str, int]

    @property
    def num_stages(self) -> int:
        return len(self.bounds) - 1

    def stages_on(self, rank: int) -> list[int]:
        """Return the stages of a pipeline rank, ascending."""
        return [stage for stage in range(self.num_stages) if self.rank_of[stage] == rank]

    def blocks_of(self, stage: int) -> tuple[NamedBlock, ...]:
        return self.blocks[self.bounds[stage] : self.bounds[stage + 1]]

    def ranks_of(self, name: str) -> tuple[int, ...]:
        """Return the pipeline ranks that hold a parameter, each once, the one of its lowest stage first."""
        return tuple(dict.fromkeys(self.rank_of[stage] for stage in self.stages_of[name]))

    def parameters_on(self, stage: int) -> list[str]:
        """Return the names of the parameters that a stage uses, in the order of the whole model."""
        return [name for name in self.sizes if stage in self.stages_of[name]]

    def describe(self) -> list[str]:
        """Return one line per stage: its rank, its blocks, and the elements of its whole parameters."""
        lines = []
        for stage in range(self.num_stages):
            blocks = self.blocks_of(stage)
            names = name_ranges([block.name for block in blocks])
            elements = sum(self.sizes[name] for name in self.parameters_on(stage))
            count = f"{len(blocks)} block{'' if len(blocks) == 1 else 's'}"
            lines.append(f"stage {stage} on rank {self.rank_of[stage]}: {names} ({count}), {elements:,} parameters")
        return lines


def make_partition(model: nn.Module, rank_of: Mapping[int, int], split: Split = "parameters") -> Partition:
    """Split a model that is a chain of blocks into stages.

    Args:
        model: the whole model; on the meta device or not.
        rank_of: stage -> index along the pipeline axis, see `colossus.schedule.actions.placement`.
        split: ``"parameters"`` for stages as equal as possible in elements of whole parameters, where a tied one counts
            on every stage that uses it; or the number of blocks of each stage.

    Raises:
        ValueError: the model is no chain, there are more stages than blocks, or the split does not fit.
    """
    blocks = tuple(pipeline_blocks(model))
    if has_hooks(model):
        raise ValueError(
            f"{type(model).__name__} has hooks of its own, but a pipeline calls its blocks, never the model as a "
            f"whole: put the hooks on a module inside of it"
        )
    num_stages = len(rank_of)
    assert sorted(rank_of) == list(range(num_stages))
    sizes = {name: spec_of(parameter).num_elements for name, parameter in model.named_parameters()}
    elements = [sum(sizes[name] for name in block.parameters) for block in blocks]
    bounds = stage_bounds(split, [block.name for block in blocks], elements, num_stages)
    stages_of = _stages_by(blocks, bounds, lambda block: block.parameters)
    return Partition(blocks, bounds, dict(rank_of), stages_of, sizes)


def keep_stages_of(model: nn.Module, partition: Partition, rank: int) -> None:
    """Delete the parameters and buffers of other pipeline ranks from a model on the meta device.

    They are deleted from every module that has them rather than set to None, which may mean a missing bias. A parameter
    that several stages share stays on each of their ranks, under all of its names. Buffers that no block owns stay.
    Afterwards a call of the model, or of a module of another rank, raises ValueError. For ``build(prepare=...)``.
    """
    here = set(partition.stages_on(rank))
    if len(here) == partition.num_stages:
        return
    modules = _stages_by(partition.blocks, partition.bounds, lambda block: block.modules)
    buffers = _stages_by(partition.blocks, partition.bounds, lambda block: block.buffers)
    parameter_names = {id(parameter): name for name, parameter in model.named_parameters()}
    buffer_names = {id(buffer): name for name, buffer in model.named_buffers()}
    record_full_order(model)
    for name, module in model.named_modules():
        for leaf, parameter in list(module._parameters.items()):
            if parameter is not None and not here.intersection(partition.stages_of[parameter_names[id(parameter)]]):
                del module._parameters[leaf]
        for leaf, buffer in list(module._buffers.items()):
            if buffer is not None and not here.intersection(buffers.get(buffer_names[id(buffer)], here)):
                del module._buffers[leaf]
        stages = modules.get(name, ())  # empty: owned by no block, so every rank has it
        if stages and not here.intersection(stages):
            keep_attributes_on_meta(module)
            message = (
                f"{name} ({type(module).__name__}) is on stage {stages[0]} (pipeline rank "
                f"{partition.rank_of[stages[0]]}), but is called on rank {rank}: a PipelineBlock must own (name) every "
                f"module that it calls"
            )
            module.register_forward_pre_hook(partial(_refuse_call, message))
    if "" not in modules:
        message = (
            f"{type(model).__name__} is called as a whole, but pipeline rank {rank} has stage "
            f"{', '.join(map(str, sorted(here)))} of {partition.num_stages} only: call engine.train_step(batch) or "
            f"engine.evaluate()"
        )
        model.register_forward_pre_hook(partial(_refuse_call, message))


def _refuse_call(message: str, module: nn.Module, args: Any) -> NoReturn:
    """Raise ValueError; with its message bound, this is the forward pre-hook of a module that this rank cannot run."""
    raise ValueError(message)


def _stages_by(
    blocks: Sequence[NamedBlock], bounds: Sequence[int], names_of: Callable[[NamedBlock], Sequence[str]]
) -> dict[str, tuple[int, ...]]:
    """Return for each name the stages whose blocks own it, ascending."""
    out: dict[str, tuple[int, ...]] = {}
    for stage, (start, stop) in enumerate(itertools.pairwise(bounds)):
        for name in {name for block in blocks[start:stop] for name in names_of(block)}:
            out[name] = (*out.get(name, ()), stage)
    return out


class MetaTensorGuard(TorchFunctionMode):
    """A mode that raises on operations on tensors of the meta device, which belong to stages of other ranks.

    Without it, some operations on CPU would return uninitialized memory.

    Raises:
        ValueError: an operation uses such a tensor; the error names the stage, the operation and the shape.
    """

    def __init__(self, stage: int) -> None:
        super().__init__()
        self._stage = stage

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != "__get__":
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and leaf.is_meta:
                    name = getattr(func, "__name__", str(func))
                    raise located_error(
                        f"stage {self._stage}: {name} on a tensor of shape {tuple(leaf.shape)} that has no values "
                        f"here. It belongs to another stage, or a reference to it was stored while the model was built "
                        f"(w = self.head.weight in pipeline_blocks, say). {MUST_NAME_ALL}"
                    )
        return func(*args, **kwargs)


MUST_NAME_ALL = (
    "A PipelineBlock must name every module, parameter and buffer that it uses, and look them up when it is called"
)
