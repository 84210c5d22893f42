"""Gradients that are not finite: what becomes of the step, and which rank and which parameter they came from."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colossus.comm.objects import all_gather_object
from colossus.config.training import Train
from colossus.context.grid import RankGrid
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext
from colossus.data_parallel.strategy import Strategy
from colossus.engine.loss_scale import SMALLEST_SCALE, LossScaler
from colossus.gradients.buckets import LocalSum
from colossus.gradients.gradient_norm import GradientNorm, values_of
from colossus.gradients.host_transfer import LateValue
from colossus.layout.parameter import spec_of


class NonFiniteGradients(FloatingPointError):
    """A step had gradients that are not finite, and was not to be skipped. Its parameters are those from before it.

    Raised on all ranks with the same words: a loop that catches it may go on with the next batch.

    Attributes:
        step: number of the step, from 1.
        report: where they came from.
        culprit: on which rank.
    """

    def __init__(self, message: str, step: int, report: NonFiniteReport) -> None:
        super().__init__(message)
        self.step, self.report, self.culprit = step, report, report.rank

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.step, self.report)


@dataclass(frozen=True)
class NonFiniteReport:
    """What all ranks found out together.

    Attributes:
        step: number of the step, from 1.
        rank: where it began: of the ranks whose own loss is not finite the first, or the rank that has the parameter.
        parameter: of the parameters whose gradient was not finite on that rank before any sum, the one that backward
            came to first: the last in the model's order. None when none was found.
        value: of its gradient: ``nan``, ``inf``, or ``too large`` for a norm of finite numbers that overflows.
        num_others: how many more parameters have such a gradient after the sums, on all ranks.
        loss: of ``rank``, if that is not finite.
        is_of_sum: whether no rank's own gradient was so, only their sum.
    """

    step: int
    rank: int
    where: str
    parameter: str | None
    value: str
    num_others: int
    loss: float | None
    is_of_sum: bool = False

    def __str__(self) -> str:
        rank = f"rank {self.rank} ({self.where})" if self.where else f"rank {self.rank}"
        more = f"{self.num_others} more parameter{'s' if self.num_others > 1 else ''}" if self.num_others else ""
        told = f"step {self.step}: "
        if self.loss is not None:
            told += f"the loss of {rank} is {self.loss}"
            if self.parameter is None:
                return told
            return f"{told}; gradients that are not finite: {self.parameter}{f' and {more}' if more else ''}"
        if self.parameter is None:
            return f"{told}the gradient norm of the global batch is not finite, but no gradient was found that is not"
        if self.is_of_sum:
            return (
                f"{told}the sum over ranks of the gradient of {self.parameter} is {self.value}, though no rank's own is"
            )
        is_value = "so large that its norm overflows" if self.value == "too large" else self.value
        return f"{told}the gradient of {self.parameter} on {rank} is {is_value}{f' (also of {more})' if more else ''}"


@dataclass(frozen=True)
class Evidence:
    """What a rank keeps of a step until it is known whether its gradients are finite: scalars on the device.

    Attributes:
        step: from 1.
        loss_sum: of this rank.
        local_sums: of `Strategy.local_sums`.
        norms: of ``norm``, after all sums; None where this rank has no gradients.
        loss_scale: of the mean loss in this step; None where it is not scaled.
        grads_are_there: whether the gradients themselves are still those of the step.
    """

    step: int
    loss_sum: Tensor
    local_sums: Sequence[LocalSum]
    norm: GradientNorm
    norms: Tensor | None
    loss_scale: Tensor | None
    grads_are_there: bool


@dataclass(frozen=True)
class _Finding:
    """Of one rank.

    Attributes:
        own: parameters of which its own gradient may not be finite: those of the pieces whose sum is not, and those
            that no collective sums.
        after: parameter -> what its gradient is after all sums, where it is not finite.
    """

    loss: float
    own: frozenset[str]
    after: Mapping[str, str]


def make_report(evidence: Evidence, order: Mapping[str, int], grid: RankGrid, group: AxisGroup) -> NonFiniteReport:
    """Exchange what each rank has found. Collective over the ranks that summed the step's numbers.

    Args:
        order: number of each parameter in the whole model.
        group: those ranks.
    """
    found = all_gather_object(_finding(evidence), group)
    after: dict[str, str] = {}
    for one in found:
        after |= one.after
    by_rank = dict(zip(group.ranks, found, strict=True))
    with_loss = [rank for rank in sorted(by_rank) if not math.isfinite(by_rank[rank].loss)]

    def last_of(rank: int) -> str | None:
        names = by_rank[rank].own & after.keys()
        return max(names, key=lambda name: order.get(name, -1), default=None)

    culprits: list[tuple[int, int]] = []
    if with_loss:
        rank = with_loss[0]
        # the ranks that hold its stages and shards have the gradients; what came first there is the same for all
        parameter = last_of(rank) or max(after, key=lambda name: order.get(name, -1), default=None)
        loss: float | None = by_rank[rank].loss
    else:
        culprits = [(order.get(name, -1), -rank) for rank in by_rank if (name := last_of(rank)) is not None]
        rank = -max(culprits)[1] if culprits else min(by_rank)
        parameter = last_of(rank) or max(after, key=lambda name: order.get(name, -1), default=None)
        loss = None
    others = len(after) - (parameter in after)
    value = after.get(parameter, "") if parameter is not None else ""
    is_of_sum = loss is None and parameter is not None and not culprits
    return NonFiniteReport(evidence.step, rank, grid.where(rank), parameter, value, others, loss, is_of_sum)


def _finding(evidence: Evidence) -> _Finding:
    params = evidence.norm.params
    norms = evidence.norms.tolist() if evidence.norms is not None else []
    after: dict[str, str] = {}
    for param, norm in zip(params, norms, strict=True):
        if not math.isfinite(norm):
            is_finite = (
                evidence.grads_are_there and param.grad is not None and bool(values_of(param.grad).isfinite().all())
            )
            after[_name(param)] = "too large" if is_finite else "nan" if math.isnan(norm) else "inf"
    summed = {name for names, _ in evidence.local_sums for name in names}
    own = {name for names, own_sum in evidence.local_sums if not own_sum.isfinite() for name in names}
    own |= after.keys() - summed
    return _Finding(evidence.loss_sum.item(), frozenset(own), after)


def _name(param: Tensor) -> str:
    spec = spec_of(param)
    return spec.name or spec.description


log = logging.getLogger("colossus.engine")


class GradientWatch:
    """Looks at the norm of each step: raises on all ranks, or has the step skipped on all of them.

    The norm is summed over all ranks anyway, so all see the same without a collective of their own. Only after a norm
    that is not finite they exchange what each has found (`make_report`). On an accelerator nothing waits for the norm:
    the step is skipped there, and the report, and what is raised, come with the step after; after the last step of
    ``train.steps`` it is waited for. Under an inexact strategy the ranks are those of a replica.

    Args:
        order: number of each parameter in the whole model.
        scaler: of the loss, under fp16: what is not finite is an overflow then.

    Attributes:
        num_skipped: steps skipped so far; on an accelerator a scalar tensor.
    """

    def __init__(
        self,
        train: Train,
        context: ParallelContext,
        strategy: Strategy,
        norm: GradientNorm,
        order: Mapping[str, int],
        scaler: LossScaler | None,
    ) -> None:
        self._train, self._grid, self._strategy, self._norm = train, context.grid, strategy, norm
        self._order, self._scaler = order, scaler
        self._group = context.group(strategy.summed_axes)
        self._is_late = context.device.type != "cpu"
        self._late_found = LateValue()
        self._evidence: Evidence | None = None
        self._num_in_row = 0
        self.num_skipped: int | Tensor = 0

    def check(self, step: int, norm: Tensor, loss_sum: Tensor) -> Tensor | None:
        """After the sums of a step, before its update.

        Args:
            step: its number, from 1.
            norm: of the gradients, as `StepReduction.finish_step` has it.
            loss_sum: of this rank alone.

        Returns:
            Whether the step is to change nothing, bool scalar; None where it is known that it may.

        Raises:
            NonFiniteGradients: on all ranks.
        """
        if not self._is_late:
            if math.isfinite(norm.item()):
                self._num_in_row = 0
                return None
            self._settle(self._gather_evidence(step, loss_sum, is_late=False))
            self.num_skipped += 1
            return torch.ones((), dtype=torch.bool)
        found = norm.isfinite().logical_not()
        self.num_skipped = self.num_skipped + found
        last, self._evidence = self._evidence, self._gather_evidence(step, loss_sum, is_late=True)
        late = self._late_found.push(found.float())
        if late:
            assert last is not None
            self._settle(last)
        elif late is not None:
            self._num_in_row = 0
        if step == self._train.steps and bool(found):
            self._settle(self._evidence)
        return found

    def state_dict(self) -> dict[str, int]:
        """Waits for the device."""
        return {"num_skipped": int(self.num_skipped), "num_skipped_in_row": self._num_in_row}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take back what `state_dict` gave; what it does not have is 0."""
        self.num_skipped, self._num_in_row = state.get("num_skipped", 0), state.get("num_skipped_in_row", 0)

    def _gather_evidence(self, step: int, loss_sum: Tensor, *, is_late: bool) -> Evidence:
        scale = None if self._scaler is None else self._scaler.scale.clone()
        sums = self._strategy.local_sums()
        return Evidence(step, loss_sum, sums, self._norm, self._norm.norms, scale, grads_are_there=not is_late)

    def _settle(self, evidence: Evidence) -> None:
        """All ranks know that the gradients of a step were not finite: tell where, and raise unless it is skipped."""
        report = make_report(evidence, self._order, self._grid, self._group)
        if evidence.loss_scale is not None:
            self._settle_overflow(report, evidence.loss_scale.item())
            return
        if self._train.on_nonfinite == "raise":
            raise NonFiniteGradients(
                f"{report}. The step changed nothing. train.on_nonfinite = 'skip' leaves such a step out and goes on, "
                f"at most train.max_skips times in a row; torch.autograd.set_detect_anomaly(True) names the operation",
                report.step,
                report,
            )
        self._num_in_row += 1
        most = self._train.max_skips
        if self._num_in_row > most:
            raise NonFiniteGradients(
                f"{report}. It is step {self._num_in_row} of that kind in a row, and train.max_skips = {most}: what "
                f"the parameters have become gives no finite gradient. Start again from before these steps with a "
                f"smaller learning rate, or with train.clip_grad_norm; set train.max_skips higher if the data is why",
                report.step,
                report,
            )
        self._tell(f"{report}: the step is skipped ({self._num_in_row} in a row, train.max_skips = {most})")

    def _settle_overflow(self, report: NonFiniteReport, scale: float) -> None:
        if scale <= SMALLEST_SCALE:
            raise NonFiniteGradients(
                f"{report}, although the loss is scaled by {scale:g} only: no overflow of float16, which a smaller "
                f"scale would mend. Some value is not finite by itself, or overflows in the forward pass: "
                f"train.precision = 'bf16' has the range of float32; torch.autograd.set_detect_anomaly(True) names the "
                f"operation",
                report.step,
                report,
            )
        self._tell(f"{report}: float16 overflowed at a loss scale of {scale:g}; the step is skipped")

    def _tell(self, message: str) -> None:
        if self._group.index == 0:
            log.warning(message)
