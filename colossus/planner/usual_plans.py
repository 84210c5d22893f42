"""The plans that people run: FSDP, HSDP, and 1D in a host beside FSDP or a pipeline. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from colossus.config.schema import Parallel
from colossus.planner.model_layouts import ModelLayout


@dataclass(frozen=True)
class UsualPlan:
    """A kind of plan.

    Attributes:
        name: its name.
        tensor: ranks of 1D tensor parallelism.
        is_split: whether these split activations by tokens.
        has_pipeline: whether it has a pipeline, and ZeRO 1 at most, or ZeRO 3.
        by_host: whether copies of the weights are shared by the ranks of a host, not by all.
    """

    name: str
    tensor: int = 1
    is_split: bool = False
    has_pipeline: bool = False
    by_host: bool = False

    def layouts(self, every: Sequence[ModelLayout], per_host: int) -> Iterator[ModelLayout]:
        """Yield its layouts, those with little recomputation first, with experts over the most ranks of a host."""
        own = [layout for layout in every if self._has(layout)]
        experts = max((layout.expert for layout in own if layout.expert <= per_host), default=1)
        yield from (layout for layout in own if layout.expert == experts)

    def _has(self, layout: ModelLayout) -> bool:
        tensor, is_alone = layout.tensor, layout.sequence.size == 1
        return is_alone and (tensor.mode, tensor.size, tensor.sequence_sharded) == ("1d", self.tensor, self.is_split)

    def allows(self, parallel: Parallel) -> bool:
        """Return whether a plan of one of its layouts is of this kind."""
        zero, pipeline = parallel.zero, parallel.pipeline.size
        if self.has_pipeline:
            return pipeline > 1 and zero.stage < 2 and zero.shard is None
        return pipeline == 1 and zero.stage == 3 and (zero.shard is not None) == self.by_host


def usual_plans(per_host: int) -> list[UsualPlan]:
    """Return the kinds of plans for hosts of ``per_host`` devices."""
    kinds = [UsualPlan("FSDP"), UsualPlan("HSDP", by_host=True)]
    if per_host > 1:
        for is_split in (False, True):
            name = f"1D{' split' * is_split}"
            kinds += [
                UsualPlan(f"{name} x FSDP", per_host, is_split),
                UsualPlan(f"{name} x pipeline", per_host, is_split, has_pipeline=True),
            ]
    return kinds
