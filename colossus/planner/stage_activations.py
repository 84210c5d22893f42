"""What a microbatch keeps on each stage of a pipeline, and the most that a rank holds in a step: put together from the
blocks of a layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from colossus.planner.layout_blocks import BlockProfile
from colossus.schedule.actions import INPUT_GRADIENT, LAST_USE, Action


@dataclass(frozen=True)
class StageActivations:
    """Bytes of one microbatch on one stage, beyond what is there without it.

    Attributes:
        kept: from the end of its forward to its backward.
        forward: at most during its forward.
        backward: at most during its backward, with what was kept.
        deferred: from the end of its backward of inputs to that of weights.
        weights: at most during that of weights, with what was deferred.
        passed: of what it is given and what it gives, the larger.
    """

    kept: int
    forward: int
    backward: int
    deferred: int
    weights: int
    passed: int

    @classmethod
    def of(cls, blocks: Sequence[BlockProfile], given: int, made: Sequence[int], *, is_last: bool) -> StageActivations:
        """Of a stage of these blocks.

        Args:
            given: bytes of what it is given by the stage before.
            made: bytes of the gradients that have been made when the backward of each block begins.
        """
        passed = 0 if is_last else blocks[-1].passed
        held, forward, backward = given, given, given
        for block, behind in zip(blocks, made, strict=True):
            forward = max(forward, held + block.forward_peak)
            held += block.kept
            backward = max(backward, held + behind + block.backward_peak)
        kept = held - passed
        deferred = sum(block.kept if block.deferred is None else block.deferred for block in blocks)
        weights = deferred + max(block.wgrad_peak for block in blocks)
        return cls(kept, forward, backward, deferred, weights, max(given, passed))


def peak_of_step(actions: Sequence[Action], stages: Mapping[int, StageActivations]) -> int:
    """The most bytes of activations while a rank does its actions."""
    held = peak = 0
    for action in actions:
        if action.kind == "forward":
            peak = max(peak, held + stages[action.stage].forward)
            held += stages[action.stage].kept
        elif action.kind in INPUT_GRADIENT:
            peak = max(peak, held - stages[action.stage].kept + stages[action.stage].backward)
            held += stages[action.stage].deferred - stages[action.stage].kept
        if action.kind == "backward_weight":
            peak = max(peak, held - stages[action.stage].deferred + stages[action.stage].weights)
        if action.kind in LAST_USE:
            held -= stages[action.stage].deferred
    return peak
