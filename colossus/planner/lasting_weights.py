"""The weights that tensor parallelism gathers once for all microbatches of a step, in a recording of one microbatch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from colossus.comm.pending import Pending
from colossus.layout.split_parameter import local_shape
from colossus.planner.fake_tensors import CountedFakeTensors
from colossus.planner.layout_blocks import LastingBytes
from colossus.planner.trace import Accumulation
from colossus.planner.trace_recorder import TraceRecorder
from colossus.tensor_parallel import gathered_weights
from colossus.tensor_parallel.dtypes import gradient_dtype
from colossus.tensor_parallel.gathered_weights import GatheredWeights
from colossus.tensor_parallel.move_plan import reduce_wgrad


class LastingWeights:
    """The bytes and the collectives of these weights and of their gradients, apart from those of a microbatch.

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
        with self._recorder.once():
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
        with self._recorder.once(), patch.object(gathered_weights, "reduce_wgrad", reduce_aside):
            pending = self._reduce(weight, gradient, *args)
        self._fake.peak = max(peak, self._fake.live)
        return pending
