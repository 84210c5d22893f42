"""What becomes of a step whose gradients are not finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from colossus.config.training import Train
from colossus.context.parallel_context import ParallelContext
from colossus.data_parallel.strategy import Strategy
from colossus.engine.late_value import LateValue
from colossus.engine.loss_scale import SMALLEST_SCALE, LossScaler
from colossus.engine.nonfinite import Evidence, NonFiniteGradients, NonFiniteReport, make_report
from colossus.gradients.gradient_norm import GradientNorm

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
