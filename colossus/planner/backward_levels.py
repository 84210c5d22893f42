"""The bytes that are alive during a backward on fake tensors: those of activations, those of gradients made so far."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from colossus.layout.split_parameter import local_shape
from colossus.planner.fake_tensors import CountedFakeTensors
from colossus.planner.layout_blocks import Level
from colossus.planner.trace import Accumulation
from colossus.planner.trace_recorder import TraceRecorder
from colossus.tensor_parallel.dtypes import gradient_dtype
from colossus.tensor_parallel.gathered_weights import WgradDeferral


class BackwardLevels:
    """The levels of a backward of one microbatch, in which each parameter gets its first gradient.

    A plan decides whether gradients stay, are in a bucket, or are reduced and freed; so they are counted apart. The
    trace gets the operators that add a later microbatch's gradients to these.

    Args:
        fake: counts the bytes.
        recorder: records the operators.
        summed: ids of the parameters whose gradients are added up before they get here.
    """

    def __init__(self, fake: CountedFakeTensors, recorder: TraceRecorder, summed: Container[int]) -> None:
        self._fake, self._recorder, self._summed = fake, recorder, summed
        self._base = self._made = self._made_before = 0
        self._levels: list[Level] = []
        self._counted: set[int] = set()

    @property
    def live(self) -> int:
        """Return the living bytes without those of gradients."""
        return self._fake.live - self._made

    def begin(self, base: int) -> None:
        """Begin the backward of a block.

        Args:
            base: bytes on top of which activations are counted.
        """
        self._base, self._made_before, self._levels = base, self._made, []
        self._fake.mark()

    def take(self) -> list[Level]:
        """End the backward of a block, and return its levels, without those that a later one exceeds."""
        self._end_level()
        most: list[Level] = []
        for activations, gradients in reversed(self._levels):  # gradients only grow
            if not most or activations > most[-1][0]:
                most.append((activations, gradients))
        return most

    @contextmanager
    def of(self, model: nn.Module, deferral: WgradDeferral) -> Iterator[None]:
        """Count the gradients of a model's parameters inside the context."""
        accumulate = deferral.accumulate

        def accumulate_and_count(weight: Any, gradient: Tensor) -> None:
            accumulate(weight, gradient)
            self._count(weight)

        with ExitStack() as stack:
            for param in model.parameters():
                if param.requires_grad:
                    stack.callback(param.register_post_accumulate_grad_hook(self._count).remove)
            stack.enter_context(patch.object(deferral, "accumulate", accumulate_and_count))
            yield

    def _count(self, param: Any) -> None:
        # a backward that defers wgrad calls the hook without a gradient, and `deferral` after its accumulation again
        if param.grad is None or id(param) in self._counted:
            return
        self._counted.add(id(param))
        nbytes = local_shape(param).numel() * gradient_dtype(param).itemsize
        self._end_level()
        self._made += nbytes
        if id(param) not in self._summed:
            self._recorder.record(Accumulation(3.0 * nbytes, "add_"))

    def _end_level(self) -> None:
        self._levels.append((max(0, self._fake.peak - self._base - self._made), self._made - self._made_before))
        self._fake.mark()
