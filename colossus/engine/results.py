"""Results of train steps and evaluations, and the requests to stop that come with them."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from colossus.gradients.host_transfer import HostRead

#: what may have asked for a stop, the last one wins: the program itself (None), or a signal to some rank
_REASONS = (None, signal.SIGUSR2, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
#: a reason counts more than those before it from so many ranks: their sum says which it was, in float32 too
_MOST_RANKS = 1 << 20


def addend(is_requested: bool, signum: int | None) -> float:
    """What a rank adds; 0 when it asks for nothing. A signal that is no stop signal counts as the program itself."""
    if not is_requested:
        return 0.0
    return float(_MOST_RANKS ** (_REASONS.index(signum) if signum in _REASONS else 0))


def signal_of(total: float) -> int | None:
    """The signal that stopped the run, None where nobody asked or no signal did."""
    reason = None
    for index, signum in enumerate(_REASONS):
        if signum is not None and total >= _MOST_RANKS**index:
            reason = int(signum)
    return reason


class StepResult:
    """Result of one optimizer step; the same on all ranks, or on those of a replica (``replica``): then what is said
    here of the global batch is of the replica's part of it.

    Under an inexact strategy gradients are divided, and clipped, by the count and the norm of the replica; the norm of
    a result of all replicas is the mean of theirs.

    The numbers stay on the device until they are first read: a loop that does not read them does not wait for it.
    `send_to_host` lets them travel while the device goes on: who reads them one step later waits for nothing.

    Attributes:
        step: number of optimizer steps done, this one included.
        lr: learning rate of this step.
        replica: index of the replica whose own numbers these are; None where they are of all.
        stop_requested: whether a rank has asked to stop; all ranks see it after the same step. On an accelerator,
            which is not waited for, that is one step later.
        stop_signal: number of the signal that made a rank ask, None when none did.

    Args:
        numbers: of `StepReduction.finish_step`.
        stops: requests to stop of all ranks, summed (`results.addend`).
        require_zero: raises unless the total of the batches' marks is 0; called when the numbers are read. None where
            the numbers have no such total.
        skipped: whether the step changed nothing.
        num_skipped: steps that did not, so far.
        loss_scale: of the mean loss in this step.
        own_tokens: of the replica alone, where replicas count for themselves.
    """

    def __init__(
        self,
        step: int,
        lr: float,
        numbers: Tensor,
        stops: float = 0.0,
        require_zero: Callable[[float], None] | None = None,
        *,
        skipped: Tensor | bool = False,
        num_skipped: Tensor | int = 0,
        loss_scale: Tensor | None = None,
        replica: int | None = None,
        own_tokens: Tensor | None = None,
    ) -> None:
        self.step, self.lr, self.replica = step, lr, replica
        self.stop_requested, self.stop_signal = stops > 0, signal_of(stops)
        self._device_numbers = numbers
        self._require_zero = require_zero
        singles = {
            "skipped": skipped, "num_skipped": num_skipped, "loss_scale": loss_scale, "replica_tokens": own_tokens
        }  # fmt: skip
        self._singles = {name: one for name, one in singles.items() if one is not None}
        self._reading: HostRead | None = None
        self._read: list[float] | None = None

    def send_to_host(self) -> bool:
        """Let all numbers travel to the host, behind what the device has been told so far. Waits for nothing.

        Returns:
            Whether they are on their way, and best read when the next step is over; on the CPU they are there.
        """
        if self._reading is None:
            on_device = [one.double() for one in self._singles.values() if isinstance(one, Tensor)]
            numbers = self._device_numbers
            if on_device:
                numbers = torch.cat((numbers, torch.stack([one.to(numbers.device) for one in on_device])))
            self._reading = HostRead(numbers)
        return self._device_numbers.device.type != "cpu"

    @property
    def is_there(self) -> bool:
        """Whether nobody waits who reads the numbers."""
        return self._read is not None or (self._reading is not None and self._reading.is_there)

    def wait(self) -> None:
        """Until the numbers are there, `send_to_host` or not."""
        self._all_numbers()

    def _all_numbers(self) -> list[float]:
        if self._read is None:
            self.send_to_host()
            assert self._reading is not None
            self._read = self._reading.wait().tolist()
        return self._read

    @property
    def _numbers(self) -> list[float]:
        """Of `StepReduction.finish_step`."""
        read = self._all_numbers()[: len(self._device_numbers)]
        if self._require_zero is not None and len(read) > 4:
            self._require_zero(read[4])
        return read

    def _single(self, name: str) -> float | None:
        one = self._singles.get(name)
        if not isinstance(one, Tensor):
            return one
        names = [name for name, one in self._singles.items() if isinstance(one, Tensor)]
        return self._all_numbers()[len(self._device_numbers) + names.index(name)]

    @property
    def tokens(self) -> int:
        """Valid tokens of the global batch."""
        return round(self._numbers[1])

    @property
    def replica_tokens(self) -> int | None:
        """Those of this rank's replica, under an inexact strategy; None where nobody counts them alone."""
        tokens = self._single("replica_tokens")
        return None if tokens is None else round(tokens)

    def of_all_replicas(self, add: Callable[[Tensor], Tensor]) -> StepResult:
        """The same with the numbers of all replicas. Collective over data.

        Args:
            add: `Strategy.sum_over_replicas`.
        """
        result = copy.copy(self)
        result.replica, result._device_numbers = None, add(self._device_numbers)
        result._reading = result._read = None
        return result

    @property
    def loss(self) -> float:
        """Mean loss per valid token of the global batch, before the step."""
        loss_sum, tokens = self._numbers[:2]
        return loss_sum / tokens if tokens else float("nan")

    @property
    def grad_norm(self) -> float:
        """Global gradient norm before clipping, each element counted once."""
        return self._numbers[2]

    @property
    def skipped(self) -> bool:
        """Whether gradients were not finite, and the step changed neither parameters nor the optimizer's state."""
        return bool(self._single("skipped"))

    @property
    def num_skipped(self) -> int:
        """Steps skipped so far, this one included."""
        return int(self._single("num_skipped") or 0)

    @property
    def loss_scale(self) -> float | None:
        """What the mean loss was scaled by in this step; None unless ``train.precision`` is fp16."""
        return self._single("loss_scale")

    def __repr__(self) -> str:
        numbers = f"loss={self.loss:.6g}, grad_norm={self.grad_norm:.6g}, tokens={self.tokens}"
        whose = "" if self.replica is None else f", replica={self.replica}"
        return f"StepResult(step={self.step}, {numbers}{whose})"


@dataclass(frozen=True)
class EvalResult:
    """Sums over the global batch of one or several evaluation steps.

    Attributes:
        metrics: name -> (sum, count) of each of the model's ``eval_metrics``.
    """

    loss_sum: float
    count: float
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Valid tokens: ``count`` rounded, which is no whole number where a loss function weighs its samples."""
        return round(self.count)

    @property
    def loss(self) -> float:
        """Mean loss per valid token."""
        return self.loss_sum / self.count if self.count else float("nan")

    @property
    def mean_metrics(self) -> dict[str, float]:
        """Name -> sum / count."""
        return {name: total / count if count else float("nan") for name, (total, count) in self.metrics.items()}


@dataclass(frozen=True)
class EvalSummary:
    """Mean loss per valid token over an evaluation; not ``complete`` when a stop was requested during it.

    ``stop_signal`` is the number of the signal that was the reason, if one was; ``metrics`` the mean of each of the
    model's ``eval_metrics``.
    """

    loss: float
    tokens: int
    step: int
    complete: bool = True
    stop_signal: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, result: EvalResult, step: int, complete: bool, stop_signal: int | None) -> EvalSummary:
        """The means of sums over all batches."""
        return cls(result.loss, result.tokens, step, complete, stop_signal, result.mean_metrics)
