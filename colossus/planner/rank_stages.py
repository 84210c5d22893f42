"""The stages of one rank of a pipeline, and their blocks. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from colossus.schedule.actions import LAST_USE, Action


@dataclass(frozen=True)
class RankStages:
    """The stages of a rank.

    Attributes:
        rank: index along the pipeline axis.
        bounds: stage s has ``blocks[bounds[s]:bounds[s + 1]]`` of the model's chain.
        rank_of: stage -> index along the pipeline axis.
        actions: actions of this rank in a step.
    """

    rank: int
    bounds: Sequence[int]
    rank_of: Mapping[int, int]
    actions: Sequence[Action]

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """Return the stages of this rank, ascending."""
        return tuple(stage for stage in range(len(self.bounds) - 1) if self.rank_of[stage] == self.rank)

    def blocks_of(self, stage: int) -> range:
        return range(self.bounds[stage], self.bounds[stage + 1])

    @cached_property
    def stage_of(self) -> Mapping[int, int]:
        """Return the stage of each block, for the blocks of all ranks."""
        return {block: stage for stage in range(len(self.bounds) - 1) for block in self.blocks_of(stage)}

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Return the stages of this rank in the order in which their gradients are reduced."""
        return tuple(action.stage for action in self.actions if action.kind == "reduce")

    @cached_property
    def last_uses(self) -> Mapping[int, int]:
        """Return the index of the last action of each stage that uses its weights; its gradients are complete then."""
        return {action.stage: index for index, action in enumerate(self.actions) if action.kind in LAST_USE}

    @cached_property
    def splits_backward(self) -> bool:
        return any(action.kind == "backward_weight" for action in self.actions)

    @cached_property
    def starts_early(self) -> frozenset[int]:
        """Return the stages whose reductions may start during their last backward: earlier stages are reduced by then.

        With a split backward there are none.
        """
        last = self.last_uses
        reduced = {action.stage: index for index, action in enumerate(self.actions) if action.kind == "reduce"}
        return frozenset(
            stage
            for number, stage in enumerate(self.order)
            if not self.splits_backward and all(reduced[before] < last[stage] for before in self.order[:number])
        )

    def ranks_with(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """Return the pipeline ranks that have any of these blocks, that of the lowest stage first."""
        if len(blocks) == 1:
            return (self.rank_of[self.stage_of[blocks[0]]],)
        return tuple(dict.fromkeys(self.rank_of[self.stage_of[block]] for block in sorted(blocks)))

    def stages_with(self, blocks: Sequence[int]) -> list[int]:
        """Return this rank's stages with any of these blocks, in the order in which they are reduced."""
        if len(blocks) == 1:
            stage = self.stage_of[blocks[0]]
            return [stage] if stage in self.stages else []
        here = {stage for block in blocks if (stage := self.stage_of[block]) in self.stages}
        return sorted(here, key=self.order.index)
