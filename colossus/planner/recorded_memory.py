"""The bytes of gradients, and of weights that are gathered for a step, apart from the activations of a recording."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from colossus.comm.pending import Pending
from colossus.layout.split_parameter import local_shape
from colossus.planner.fake_tensors import CountedFakeTensors
from colossus.planner.trace import Accumulation
from colossus.planner.trace_recorder import TraceRecorder
from colossus.tensor_parallel import gathered_weights
from colossus.tensor_parallel.dtypes import gradient_dtype
from colossus.tensor_parallel.gathered_weights import GatheredWeights, WgradDeferral
from colossus.tensor_parallel.move_plan import reduce_wgrad

#: the most bytes between two gradients of a backward: of activations, and of gradients that it has made by then
Level = tuple[int, int]


@dataclass(frozen=True)
class LastingBytes:
    """Bytes of a block's weights that tensor parallelism gathers once for all microbatches of a step.

    Attributes:
        weights: bytes of the gathered weights.
        gradients: bytes of their gradients, which wait for the last microbatch.
        largest: bytes of the largest of these gradients.
        reduced: bytes that are left of these gradients after their reduction.
    """

    weights: int = 0
    gradients: int = 0
    largest: int = 0
    reduced: int = 0


class LastingWeights:
    """The weights that tensor parallelism gathers once for all microbatches of a step, and their gradients.

    Their bytes and collectives are recorded apart from those of a microbatch.

    Args:
        weights: the weights of the model.
        recorder: records their collectives as events that run once per step.
        fake: counts bytes.
    """

    def __init__(self, weights: GatheredWeights, recorder: TraceRecorder, fake: CountedFakeTensors) -> None:
        self._weights, self._recorder, self._fake = weights, recorder, fake
        self._gather, self._reduce = weights.gather, weights.reduce
        self._bytes = LastingBytes()
        #: ids of the weights whose gradients are added up whole
        self.summed: set[int] = set()

    def take(self) -> LastingBytes:
        """Return the bytes of gradients since the last call. The bytes of weights are those that are set aside."""
        taken, self._bytes = self._bytes, LastingBytes()
        return taken

    @contextmanager
    def in_a_step(self) -> Iterator[None]:
        """Run a microbatch as the last of its step: weights are gathered and gradients reduced, once per step."""
        weights = self._weights
        if weights.scope != "step":
            yield
            return
        weights.begin_step()
        weights.set_last_microbatch()
        with patch.object(weights, "gather", self._gather_once), patch.object(weights, "reduce", self._reduce_once):
            yield
        weights.end_step()

    def _gather_once(self, weight: Tensor, *args: Any) -> Pending:
        peak = self._fake.peak
        with self._recorder.part("once"):
            gathered = self._gather(weight, *args)
        if gathered.wait() is not weight:
            self._fake.set_aside(gathered.wait())
            self._fake.peak = max(peak, self._fake.live)
        return gathered

    def _reduce_once(self, weight: Tensor, gradient: Tensor, *args: Any) -> Pending | None:
        if id(weight) not in self._weights._gathered:
            return self._reduce(weight, gradient, *args)

        def reduce_aside(weight: Tensor, total: Tensor, *args: Any) -> Pending:
            if total is not gradient:
                self._fake.set_aside(total)
            return reduce_wgrad(weight, total, *args)

        if id(weight) not in self.summed:
            self.summed.add(id(weight))
            width, own = gradient_dtype(weight).itemsize, self._bytes
            whole, part = gradient.numel() * width, local_shape(weight).numel() * width
            self._bytes = replace(
                own, gradients=own.gradients + whole, largest=max(own.largest, whole), reduced=own.reduced + part
            )
        added = gradient.nbytes + 2.0 * gradient.numel() * gradient_dtype(weight).itemsize
        self._recorder.record(Accumulation(added, "add_"))
        peak = self._fake.peak
        with self._recorder.part("once"), patch.object(gathered_weights, "reduce_wgrad", reduce_aside):
            pending = self._reduce(weight, gradient, *args)
        self._fake.peak = max(peak, self._fake.live)
        return pending


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
