"""The activations of a microbatch on each stage of a pipeline, and the peak of a rank in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from colossus.planner.layout_blocks import BlockProfile
from colossus.schedule.actions import INPUT_GRADIENT, LAST_USE, Action


@dataclass(frozen=True)
class StageActivations:
    """Bytes of activations of one microbatch on one stage.

    Attributes:
        saved: bytes from the end of its forward to its backward.
        forward: the most during its forward.
        backward: the most during its backward (or dgrad), ``saved`` included.
        deferred: bytes from the end of its dgrad to its wgrad.
        weights: the most during its wgrad, ``deferred`` included.
        passed: the larger of its input from the stage before and its output to the next.
    """

    saved: int
    forward: int
    backward: int
    deferred: int
    weights: int
    passed: int

    @classmethod
    def of(
        cls, blocks: Sequence[BlockProfile], received: int, made: Sequence[int], *, is_last: bool
    ) -> StageActivations:
        """Return the activations of a stage.

        Args:
            blocks: profiles of its blocks.
            received: bytes of its input from the stage before.
            made: bytes of parameter gradients that exist when the backward of each block begins.
            is_last: whether it is the last stage.
        """
        passed = 0 if is_last else blocks[-1].passed
        live, forward, backward = received, received, received
        for block, gradients in zip(blocks, made, strict=True):
            forward = max(forward, live + block.forward_peak)
            live += block.saved
            backward = max(backward, live + gradients + block.backward_peak)
        saved = live - passed
        deferred = sum(block.saved if block.deferred is None else block.deferred for block in blocks)
        weights = deferred + max(block.wgrad_peak for block in blocks)
        return cls(saved, forward, backward, deferred, weights, max(received, passed))


def peak_of_step(actions: Sequence[Action], stages: Mapping[int, StageActivations]) -> int:
    """Return the most bytes of activations while a rank runs its actions."""
    live = peak = 0
    for action in actions:
        if action.kind == "forward":
            peak = max(peak, live + stages[action.stage].forward)
            live += stages[action.stage].saved
        elif action.kind in INPUT_GRADIENT:
            peak = max(peak, live - stages[action.stage].saved + stages[action.stage].backward)
            live += stages[action.stage].deferred - stages[action.stage].saved
        if action.kind == "backward_weight":
            peak = max(peak, live - stages[action.stage].deferred + stages[action.stage].weights)
        if action.kind in LAST_USE:
            live -= stages[action.stage].deferred
    return peak
