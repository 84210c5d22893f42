"""Steps that all ranks skip, since gradients are not finite or no label counts, and fp16's loss scale."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from colossus.arithmetic import listed
from colossus.comm.host_transfer import HostRead
from colossus.comm.late import Late
from colossus.comm.objects import all_gather_object
from colossus.config.training import LossScale, Train
from colossus.context.parallel_context import ParallelContext
from colossus.data.model_input import model_input
from colossus.gradients.gradient_norm import GradientNorm
from colossus.layout.parameter import spec_of
from colossus.nest import tensors

log = logging.getLogger("colossus.engine")

GROWTH, BACKOFF = 2.0, 0.5
#: the 30th halving of torch's first scale: a gradient of the mean loss that overflows at it is above 1e9
SMALLEST_SCALE = 2.0**-14


class NonFiniteGradients(FloatingPointError):
    """The error for a step with gradients that are not finite. The step is counted, and has changed no parameter.

    All ranks raise it with the same message when a step is complete: that step on the CPU, the next step on an
    accelerator, where the host does not wait for the norm. A loop that catches it continues with the next batch, and
    has lost none.

    Attributes:
        step: number of the step, from 1.
        parameters: those whose gradients were not finite, in the order of backward.
    """

    def __init__(self, message: str, step: int, parameters: Sequence[str]) -> None:
        super().__init__(message)
        self.step, self.parameters = step, parameters

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.step, self.parameters)


class _Numbers(NamedTuple):
    """Numbers of a step, kept on the device until it is known whether its gradients are finite."""

    step: int  # from 1
    loss_sum: Tensor  # this rank's sum
    norms: Tensor | None  # norm of each parameter's gradient after all sums; None if this rank has none
    loss_scale: Tensor | None  # scale of the mean loss in this step; None if it is not scaled


class GradientWatch:
    """The check of the gradient norm in each step: if it is not finite, all ranks skip the step, and report or raise.

    All ranks see the same norm. Only if it is not finite do they exchange the names of parameters. On an accelerator
    the host does not wait for the norm, so the report or the error comes with the next step. It does wait after the
    last step of ``train.steps`` and before a save. Under an inexact strategy the ranks are those of a replica.

    Args:
        train: the section ``train``.
        context: the rank's context.
        axes: axes over which a step's numbers are summed.
        norm: norms of the gradients.
        order: number of each parameter in the whole model.
        scaler: loss scaler under fp16, with which a gradient that is not finite is an overflow.

    Attributes:
        num_skipped: steps skipped so far; on an accelerator a scalar tensor.
    """

    def __init__(
        self,
        train: Train,
        context: ParallelContext,
        axes: Sequence[str],
        norm: GradientNorm,
        order: Mapping[str, int],
        scaler: LossScaler | None,
    ) -> None:
        self._train, self._group, self._norm = train, context.group(axes), norm
        self._order, self._scaler = order, scaler
        self._is_late = context.device.type != "cpu"
        #: whether a step was skipped, and why, with its numbers
        self._flags: Late[HostRead, _Numbers] = Late()
        #: error to raise once the running step is complete
        self._failure: NonFiniteGradients | None = None
        self._num_in_row = 0
        self._has_warned_of_empty = False
        self.num_skipped: int | Tensor = 0

    def check(self, step: int, norm: Tensor, count: Tensor, loss_sum: Tensor) -> Tensor | None:
        """Check a step after its sums and before its update.

        Args:
            step: number of the step, from 1.
            norm: norm of the gradients over all ranks.
            count: number of labels over all ranks; a step without labels is skipped, whatever its gradients are.
            loss_sum: sum of this rank alone.

        Returns:
            A bool scalar, whether the step must be skipped; None where the host knows already that it need not be.
        """
        scale = None if self._scaler is None else self._scaler.scale.clone()
        numbers = _Numbers(step, loss_sum, self._norm.norms, scale)
        is_empty = count == 0
        skipped = norm.isfinite().logical_not() | is_empty
        self._read(self._flags.push(HostRead(torch.stack((skipped, is_empty))), numbers))
        if self._is_late:
            self.num_skipped = self.num_skipped + skipped
            if step == self._train.steps:
                self._read(self._flags.settle())
            return skipped
        self.num_skipped += int(skipped)
        return skipped if skipped else None

    def raise_failure(self) -> None:
        """Raise an error that was found, between two steps.

        Raises:
            NonFiniteGradients: on all ranks.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def settle(self) -> None:
        """Wait until it is known whether the gradients of the last step were finite, before a save. Collective.

        Raises:
            NonFiniteGradients: on all ranks.
        """
        self._read(self._flags.settle())
        self.raise_failure()

    def _read(self, due: list[tuple[HostRead, _Numbers]]) -> None:
        for flags, numbers in due:
            is_skipped, is_empty = flags.wait().tolist()
            if is_empty:
                self._warn_of_empty(numbers.step)
            elif is_skipped:
                self._skip_or_raise(numbers)
            else:
                self._num_in_row = 0

    def state_dict(self) -> dict[str, int]:
        """Return the counts of skipped steps; waits for the device."""
        return {"num_skipped": int(self.num_skipped), "num_skipped_in_row": self._num_in_row}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Load the result of `state_dict`; missing entries are 0."""
        self.num_skipped, self._num_in_row = state.get("num_skipped", 0), state.get("num_skipped_in_row", 0)
        self._flags.clear()  # as the failure, they belong to a step before the load
        self._failure = None

    def _skip_or_raise(self, numbers: _Numbers) -> None:
        """Report a step whose gradients were not finite, or record the error to raise. Collective over the ranks."""
        step, max_skips, scale = numbers.step, self._train.max_skips, numbers.loss_scale
        norms = [] if numbers.norms is None else numbers.norms.tolist()
        bad = [
            spec_of(param).name for param, norm in zip(self._norm.params, norms, strict=True) if not math.isfinite(norm)
        ]
        by_rank = all_gather_object((numbers.loss_sum.item(), bad), self._group)
        # backward spreads infinities: they began at the last of these parameters, or in what follows it
        parameters = sorted(
            {name for _, names in by_rank for name in names}, key=lambda name: -self._order.get(name, -1)
        )
        loss = sum(loss for loss, _ in by_rank)
        what = f"the gradient of {listed(parameters)}" if parameters else "the gradient norm"
        words = f"step {step}: {what} is not finite, the loss is {'finite' if math.isfinite(loss) else loss}"
        if scale is not None and scale.item() > SMALLEST_SCALE:
            self._warn(f"{words}: float16 overflowed at a loss scale of {scale.item():g}; the step is skipped")
            return
        self._num_in_row += 1
        if scale is not None:
            remedy = f", although the loss is scaled by {scale.item():g} only; train.precision = 'bf16' overflows later"
        elif self._train.on_nonfinite == "raise":
            remedy = (
                ". The step changed nothing. train.on_nonfinite = 'skip' skips such a step and continues, at most "
                "train.max_skips times in a row"
            )
        elif self._num_in_row > max_skips:
            remedy = f". It is step {self._num_in_row} of that kind in a row, and train.max_skips = {max_skips}"
        else:
            self._warn(f"{words}: the step is skipped ({self._num_in_row} in a row, train.max_skips = {max_skips})")
            return
        anomaly = "; torch.autograd.set_detect_anomaly(True) names the operation"
        self._failure = self._failure or NonFiniteGradients(words + remedy + anomaly, step, parameters)

    def _warn_of_empty(self, step: int) -> None:
        if not self._has_warned_of_empty:
            self._warn(
                f"step {step}: no label counts (the loss function returned a count of 0 on all ranks): the step "
                f"changes nothing, and its loss is nan. Further steps of that kind are not logged"
            )
        self._has_warned_of_empty = True

    def _warn(self, message: str) -> None:
        if self._group.index == 0:
            log.warning(message)


class LossScaler:
    """The scale of the loss, as in `torch.amp.GradScaler`.

    It is doubled after a number of steps without an overflow, and halved by each overflow, whose step is skipped
    (Micikevicius et al., 1710.03740, section 3.2).

    As in torch, it is the scale of the gradient of the *mean* loss. The engine backpropagates sums, which are larger by
    the number of tokens. So it multiplies a loss by scale / n, where n is a power of two near that number, so that the
    division is exact. n is the count of the loss function in the first step, the same under every plan. In the first
    step itself it is computed from the shapes of the batch, and all ranks agree on it. While `train.batch_ramp` grows
    the batch, n stays, and the scale falls as needed.

    Args:
        options: ``train.loss_scale``; None for its defaults.
        context: the rank's context.
        batch_size: samples of the global batch.

    Attributes:
        scale: float32 scalar on the device.
        factor: factor of the losses in the running step, float32 scalar; None before the first.
    """

    def __init__(self, options: LossScale | None, context: ParallelContext, batch_size: int) -> None:
        options = options or LossScale()
        self._context, self._batch_size, self._growth_interval = context, batch_size, options.growth_interval
        self.scale = torch.full((), options.init, dtype=torch.float32, device=context.device)
        #: steps without an overflow since the scale last changed
        self._growth_tracker = torch.zeros((), dtype=torch.int32, device=context.device)
        #: n, a power of two, float32 scalar on the device
        self._num_tokens: Tensor | None = None
        self._is_first = False
        self.factor: Tensor | None = None

    def begin_step(self, batch: Any) -> Tensor:
        """Return the `factor` of the step of a data rank's batch. Collective before the first step."""
        if self._num_tokens is None:
            world = self._context.group(self._context.grid.names)
            largest = max(all_gather_object(self._batch_size * tokens_per_sample(batch), world))
            self._num_tokens = torch.full_like(self.scale, 1 << (largest.bit_length() - 1))
            self._is_first = True
        self.factor = self.scale / self._num_tokens
        return self.factor

    def update(self, found_inf: Tensor | None, count: Tensor) -> None:
        """Update the scale after a step, without waiting. A step without labels changes nothing.

        Args:
            found_inf: whether a gradient was not finite, bool scalar; None: all were finite.
            count: samples or tokens whose losses were summed in the global batch.
        """
        if self._is_first:
            self._is_first = False
            assert self._num_tokens is not None
            mantissa, _ = torch.frexp(count)  # between 1/2 and 1, so that the division is exact
            power_of_two = (count / mantissa / 2).float()  # the largest that is not above the count
            self._num_tokens = torch.where(count.isfinite() & (count >= 1), power_of_two, self._num_tokens)
        overflow = torch.zeros((), device=self.scale.device) if found_inf is None else found_inf.float()
        before = self.scale.clone(), self._growth_tracker.clone()
        torch._amp_update_scale_(self.scale, self._growth_tracker, overflow, GROWTH, BACKOFF, self._growth_interval)
        for value, old in zip((self.scale, self._growth_tracker), before, strict=True):
            value.copy_(torch.where(count == 0, old, value))

    def state_dict(self) -> dict[str, float]:
        """Return the scale and its counters; waits for the device."""
        state = {"scale": self.scale.item(), "growth_tracker": int(self._growth_tracker.item())}
        return state if self._num_tokens is None else {**state, "num_tokens": int(self._num_tokens.item())}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Load the result of `state_dict`, under any plan."""
        self.scale.fill_(state["scale"])
        self._growth_tracker.fill_(state["growth_tracker"])
        self._num_tokens = torch.full_like(self.scale, state["num_tokens"]) if "num_tokens" in state else None
        self._is_first = False


def tokens_per_sample(batch: Any) -> int:
    """Return the tokens of a sample by the shapes: dim 1 of integers [batch, tokens] and of [batch, tokens, features].

    It is 1 for anything else, where a sample is the unit.
    """
    _, x = next(tensors(model_input(batch)), (None, None))
    if x is not None and (x.dim() == 3 or (x.dim() == 2 and not (x.is_floating_point() or x.is_complex()))):
        return max(1, int(x.shape[1]))
    return 1
