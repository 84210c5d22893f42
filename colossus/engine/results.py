"""Results of train steps and evaluations, and the stop requests that they carry."""

from __future__ import annotations

import copy
import math
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from colossus.comm.host_transfer import HostRead
from colossus.layers.router import SUMS

#: reasons for a stop, of which the last one wins: the program itself (None), or a signal to some rank
_REASONS = (None, signal.SIGUSR2, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
#: a reason outweighs earlier ones from this number of ranks, so that their sum has the reason, in float32 too
_MOST_RANKS = 1 << 20


def addend(signum: int | None) -> float:
    """Return the addend of a rank that requests a stop; any signal but a stop signal counts as the program itself."""
    return float(_MOST_RANKS ** (_REASONS.index(signum) if signum in _REASONS else 0))


def signal_of(total: float) -> int | None:
    """Return the signal that stopped the run; None if no rank requested a stop, or no signal did."""
    signals = [int(signum) for index, signum in enumerate(_REASONS) if signum and total >= _MOST_RANKS**index]
    return signals[-1] if signals else None


@dataclass(frozen=True)
class Routing:
    """Counts of the routers in a step.

    Attributes:
        sizes: name of each router -> number of experts.
        totals: totals of the routers one after the other, see `colossus.layers.router.Router`.
    """

    sizes: Mapping[str, int]
    totals: Tensor

    def entries_of(self, numbers: Sequence[float]) -> dict[str, dict[str, Any]]:
        """Return the entries of `StepResult.experts` by name of the router."""
        by_name: dict[str, dict[str, Any]] = {}
        rest = list(numbers)
        for name, num_experts in self.sizes.items():
            chosen, sums = rest[:num_experts], dict(zip(SUMS, rest[num_experts:], strict=False))
            rest = rest[num_experts + len(SUMS) :]
            tokens, mean = sums.pop("tokens") or math.nan, sum(chosen) / num_experts or math.nan
            means = {key: sums[key] / tokens for key in ("entropy", "aux_loss", "z_loss")}
            counts = {"dropped": round(sums["dropped"]), "tokens": [round(number) for number in chosen]}
            by_name[name] = {"max_over_mean": max(chosen) / mean, **means, **counts}
        return by_name


class StepResult:
    """Result of one optimizer step, the same on all ranks.

    With ``replica`` set it is the same on the ranks of that replica, and its numbers are those of the replica's part of
    the global batch. Under an inexact strategy gradients are divided, and clipped, by the count and the norm of the
    replica; the norm of a result of all replicas is the mean of theirs.

    The numbers stay on the device until they are first read. `send_to_host` starts their copy while the device
    continues, so that reading them one step later waits for nothing.

    Attributes:
        step: number of optimizer steps done, this one included.
        lr: learning rate of this step.
        replica: index of the replica whose own numbers these are; None if they are of all.
        stop_requested: whether a rank has requested a stop; all ranks see it after the same step. On an accelerator,
            which is not waited for, that is one step later.
        stop_signal: number of the signal that caused the request, or None.

    Args:
        numbers: numbers of the global batch: loss sum, tokens, gradient norm, stop requests.
        stops: sum of the stop requests that all ranks act on now (`results.addend`).
        routing: counts of the routers, if there are any.
        more: further numbers by name: ``skipped``, ``num_skipped``, ``loss_scale``; ``own_tokens`` of the replica
            alone, if replicas do not wait for each other; None: there is none.
    """

    def __init__(
        self,
        step: int,
        lr: float,
        numbers: Tensor,
        stops: float = 0.0,
        replica: int | None = None,
        routing: Routing | None = None,
        **more: Tensor | int | None,
    ) -> None:
        self.step, self.lr, self.replica = step, lr, replica
        self.stop_requested, self.stop_signal = stops > 0, signal_of(stops)
        self._numbers = numbers
        self._more: dict[str, Tensor | int] = {"skipped": 0, "num_skipped": 0}
        self._more |= {name: value for name, value in more.items() if value is not None}
        self._reading: HostRead | None = None
        self._routing = routing

    def send_to_host(self) -> bool:
        """Start to copy all numbers to the host, after the work that is queued on the device, without waiting.

        Returns:
            Whether they are under way, and best read when the next step is over; on the CPU they have arrived.
        """
        if self._reading is None:
            first = self._numbers[0]
            more = [
                value.to(first) if isinstance(value, Tensor) else torch.full_like(first, value)
                for value in self._more.values()
            ]
            routed = [] if self._routing is None else [self._routing.totals.to(first)]
            self._reading = HostRead(torch.cat((self._numbers, torch.stack(more), *routed)))
        return self._numbers.device.type != "cpu"

    @property
    def has_arrived(self) -> bool:
        """Return whether reading the numbers waits for nothing."""
        return self._reading is not None and self._reading.has_arrived

    def wait(self) -> dict[str, float]:
        """Return all numbers by name, once they have arrived, with or without `send_to_host`."""
        self.send_to_host()
        assert self._reading is not None
        return dict(zip(self._names, self._reading.wait().tolist(), strict=False))

    @property
    def _names(self) -> tuple[str, ...]:
        return ("loss_sum", "tokens", "grad_norm", "stops", *self._more)

    @property
    def experts(self) -> dict[str, dict[str, Any]]:
        """Counts of each router by name.

        They are ``tokens`` of each expert, the largest over their mean (``max_over_mean``), choices ``dropped``, and
        means over tokens of the ``entropy`` of scores (in nats) and of the auxiliary losses, which are not in ``loss``.
        """
        self.wait()
        if self._routing is None or self._reading is None:
            return {}
        return self._routing.entries_of(self._reading.wait().tolist()[len(self._names) :])

    @property
    def count(self) -> float:
        """Valid tokens of the global batch; not a whole number if a loss function weighs its samples."""
        return self.wait()["tokens"]

    @property
    def tokens(self) -> int:
        """Rounded ``count``."""
        return round(self.count)

    @property
    def replica_tokens(self) -> int | None:
        """Tokens of this rank's replica, under an inexact strategy; None if they are not counted alone."""
        tokens = self.wait().get("own_tokens")
        return None if tokens is None else round(tokens)

    def of_all_replicas(self, add: Callable[[Tensor], Tensor]) -> StepResult:
        """Return the result with the numbers of all replicas. Collective over data.

        Args:
            add: `Strategy.sum_over_replicas`.
        """
        result = copy.copy(self)
        result.replica, result._numbers, result._reading = None, add(self._numbers), None
        return result

    @property
    def loss(self) -> float:
        """Mean loss per valid token of the global batch, before the step; nan if there is no valid token."""
        numbers = self.wait()
        return numbers["loss_sum"] / numbers["tokens"] if numbers["tokens"] else float("nan")

    @property
    def grad_norm(self) -> float:
        """Global gradient norm before clipping, each element counted once."""
        return self.wait()["grad_norm"]

    @property
    def skipped(self) -> bool:
        """Return whether the step changed neither parameters nor the optimizer's state.

        That is so if gradients were not finite, or no label counted.
        """
        return bool(self.wait()["skipped"])

    @property
    def skipped_on_device(self) -> Tensor | int:
        """`skipped` as a number on the device that computed it, read without waiting; 0 if no step is skipped."""
        return self._more["skipped"]

    @property
    def num_skipped(self) -> int:
        """Steps skipped so far, this one included."""
        return int(self.wait()["num_skipped"])

    @property
    def loss_scale(self) -> float | None:
        """Scale of the mean loss in this step; None unless ``train.precision`` is fp16."""
        return self.wait().get("loss_scale")

    def __repr__(self) -> str:
        numbers = f"loss={self.loss:.6g}, grad_norm={self.grad_norm:.6g}, tokens={self.tokens}"
        whose = "" if self.replica is None else f", replica={self.replica}"
        return f"StepResult(step={self.step}, {numbers}{whose})"


@dataclass(frozen=True)
class EvalResult:
    """Sums over the global batch of one or several evaluation steps.

    Attributes:
        loss_sum: sum of the losses.
        count: valid tokens.
        sums: name -> (sum, count) of each of the model's ``eval_metrics``.
        step: optimizer steps done.
        complete: whether no stop was requested during it.
        stop_signal: number of the signal that caused the request, or None.
        more: numbers that hooks have added (`Hook.add_to_evaluation`), by name.
    """

    loss_sum: float
    count: float
    sums: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    step: int = 0
    complete: bool = True
    stop_signal: int | None = None
    more: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Valid tokens: rounded ``count``, which is not whole if a loss function weighs its samples."""
        return round(self.count)

    @property
    def loss(self) -> float:
        """Mean loss per valid token."""
        return self.loss_sum / self.count if self.count else float("nan")

    @property
    def metrics(self) -> dict[str, float]:
        """Means of the metrics by name."""
        return {name: total / count if count else float("nan") for name, (total, count) in self.sums.items()}

    @property
    def numbers(self) -> dict[str, float]:
        """All numbers by their names in rows of metrics: ``validation_loss``, ``validation_accuracy``, .."""
        means = {"loss": self.loss, **self.metrics}
        return {f"validation_{name}": mean for name, mean in means.items()} | dict(self.more)
