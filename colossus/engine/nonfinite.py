"""Steps that change nothing, on all ranks alike: gradients that are not finite, which may raise, too; no label that
counts. fp16's loss scale follows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from colossus.arithmetic import listed
from colossus.comm.objects import all_gather_object
from colossus.config.training import LossScale, Train
from colossus.context.parallel_context import ParallelContext
from colossus.engine.inputs import model_input
from colossus.gradients.gradient_norm import GradientNorm
from colossus.gradients.host_transfer import HostRead
from colossus.layout.parameter import spec_of
from colossus.nest import tensors

log = logging.getLogger("colossus.engine")

GROWTH, BACKOFF = 2.0, 0.5
#: a gradient of the mean loss that overflows at this scale is above 1e9, the 30th halving of torch's first scale
SMALLEST_SCALE = 2.0**-14


class NonFiniteGradients(FloatingPointError):
    """A step had gradients that are not finite, and was not to be skipped. It counts, and changed no parameter.

    Raised on all ranks with the same words, once a step is complete: that one, or on an accelerator, where nothing
    waits for the norm, the next. So a loop that catches it goes on with the next batch, and has lost none.

    Attributes:
        step: number of the step, from 1.
        parameters: whose gradients were not finite, in the order in which backward came to them.
    """

    def __init__(self, message: str, step: int, parameters: Sequence[str]) -> None:
        super().__init__(message)
        self.step, self.parameters = step, parameters

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.step, self.parameters)


class _Numbers(NamedTuple):
    """Of a step, kept on the device until it is known whether its gradients are finite."""

    step: int  # from 1
    loss_sum: Tensor  # of this rank
    norms: Tensor | None  # of each parameter's gradient after all sums; None where this rank has none
    loss_scale: Tensor | None  # of the mean loss in this step; None where it is not scaled


class GradientWatch:
    """Looks at the norm of each step, has the step skipped on all ranks where it is not finite, and then reports that
    or raises.

    All ranks see the same norm. Only where it is not finite they exchange what each has found. On an accelerator
    nothing waits for the norm: the report, and what is raised, come with the step after; after the last step of
    ``train.steps``, and before a save, it is waited for. Under an inexact strategy the ranks are those of a replica.

    Args:
        axes: over which a step's numbers are summed.
        order: number of each parameter in the whole model.
        scaler: of the loss, under fp16: what is not finite is an overflow then.

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
        #: of the last step, where nobody knows yet whether its gradients were finite: that, on its way to the host
        self._unread: tuple[_Numbers, HostRead] | None = None
        #: what is to be raised once the step that runs is complete
        self._failure: NonFiniteGradients | None = None
        self._num_in_row = 0
        self._has_told_of_empty = False
        self.num_skipped: int | Tensor = 0

    def check(self, step: int, norm: Tensor, count: Tensor, loss_sum: Tensor) -> Tensor | None:
        """After the sums of a step (from 1), before its update.

        Args:
            norm: of the gradients, over all ranks.
            count: of labels, over all ranks; a step in which none counts is skipped, whatever its gradients are.
            loss_sum: of this rank alone.

        Returns:
            Whether the step is to change nothing, bool scalar; None where it is known that it may.
        """
        scale = None if self._scaler is None else self._scaler.scale.clone()
        numbers = _Numbers(step, loss_sum, self._norm.norms, scale)
        is_empty = count == 0
        skipped = norm.isfinite().logical_not() | is_empty
        read = HostRead(torch.stack((skipped, is_empty)))
        self._read_last()
        self._unread = numbers, read
        if self._is_late:
            self.num_skipped = self.num_skipped + skipped
            if step == self._train.steps:
                self._read_last()
            return skipped
        self._read_last()
        self.num_skipped += int(skipped)
        return skipped if skipped else None

    def raise_failure(self) -> None:
        """Raise what has been found, between two steps.

        Raises:
            NonFiniteGradients: on all ranks.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def settle(self) -> None:
        """Wait until it is known whether the gradients of the last step were finite, so that a save has it. Collective.

        Raises:
            NonFiniteGradients: on all ranks.
        """
        self._read_last()
        self.raise_failure()

    def _read_last(self) -> None:
        if self._unread is not None:
            (numbers, read), self._unread = self._unread, None
            is_skipped, is_empty = read.wait().tolist()
            if is_empty:
                self._tell_of_empty(numbers.step)
            elif is_skipped:
                self._skip_or_raise(numbers)
            else:
                self._num_in_row = 0

    def state_dict(self) -> dict[str, int]:
        """Waits for the device."""
        return {"num_skipped": int(self.num_skipped), "num_skipped_in_row": self._num_in_row}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take back what `state_dict` gave; what it does not have is 0."""
        self.num_skipped, self._num_in_row = state.get("num_skipped", 0), state.get("num_skipped_in_row", 0)
        self._unread = self._failure = None  # of a step that the run has left

    def _skip_or_raise(self, numbers: _Numbers) -> None:
        """All ranks know that the gradients of a step were not finite: report it, or note what is to be raised.
        Collective over them.
        """
        step, most, scale = numbers.step, self._train.max_skips, numbers.loss_scale
        norms = [] if numbers.norms is None else numbers.norms.tolist()
        bad = [
            spec_of(param).name for param, norm in zip(self._norm.params, norms, strict=True) if not math.isfinite(norm)
        ]
        found = all_gather_object((numbers.loss_sum.item(), bad), self._group)
        # what is not finite spreads with backward: it came from where the last of these is used, or behind it
        parameters = sorted({name for _, names in found for name in names}, key=lambda name: -self._order.get(name, -1))
        loss = sum(loss for loss, _ in found)
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
                ". The step changed nothing. train.on_nonfinite = 'skip' leaves such a step out and goes on, at most "
                "train.max_skips times in a row"
            )
        elif self._num_in_row > most:
            remedy = f". It is step {self._num_in_row} of that kind in a row, and train.max_skips = {most}"
        else:
            self._warn(f"{words}: the step is skipped ({self._num_in_row} in a row, train.max_skips = {most})")
            return
        anomaly = "; torch.autograd.set_detect_anomaly(True) names the operation"
        self._failure = self._failure or NonFiniteGradients(words + remedy + anomaly, step, parameters)

    def _tell_of_empty(self, step: int) -> None:
        if not self._has_told_of_empty:
            self._warn(
                f"step {step}: no label counts (the loss function returned a count of 0 on all ranks): the step "
                f"changes nothing, and its loss is nan. Further steps of that kind are not told"
            )
        self._has_told_of_empty = True

    def _warn(self, message: str) -> None:
        if self._group.index == 0:
            log.warning(message)


class LossScaler:
    """The scale of the loss as `torch.amp.GradScaler` has it: doubled after a number of steps without an overflow,
    halved by each, whose step is skipped (Micikevicius et al., 1710.03740, section 3.2).

    It is the scale of the gradient of the *mean* loss, as there. The engine backpropagates sums, which are larger by
    the number of tokens; so a loss is multiplied by the scale over n, a power of two near that number: a division by it
    is exact. n is what the loss function counted in the first step, the same under every plan; for the first step
    itself it is taken from the shapes of the batch, and agreed on by all ranks. Where `train.batch_ramp` lets the batch
    grow, n stays, and the scale falls by as much as it must.

    Args:
        options: None: the defaults.
        batch_size: samples of the global batch.

    Attributes:
        scale: float32 scalar on the device.
        factor: what the losses of the step that runs are multiplied by, float32 scalar; None before the first.
    """

    def __init__(self, options: LossScale | None, context: ParallelContext, batch_size: int) -> None:
        options = options or LossScale()
        self._context, self._batch_size, self._growth_interval = context, batch_size, options.growth_interval
        self.scale = torch.full((), options.init, dtype=torch.float32, device=context.device)
        #: steps without an overflow since the scale last changed
        self._growth_tracker = torch.zeros((), dtype=torch.int32, device=context.device)
        #: a power of two, float32 scalar on the device
        self._num_tokens: Tensor | None = None
        self._is_first = False
        self.factor: Tensor | None = None

    def begin_step(self, batch: Any) -> Tensor:
        """The `factor` of the step of this batch of a data rank. Collective before the first step."""
        if self._num_tokens is None:
            world = self._context.group(self._context.grid.names)
            largest = max(all_gather_object(self._batch_size * tokens_per_sample(batch), world))
            self._num_tokens = torch.full_like(self.scale, 1 << (largest.bit_length() - 1))
            self._is_first = True
        self.factor = self.scale / self._num_tokens
        return self.factor

    def update(self, found_inf: Tensor | None, count: Tensor) -> None:
        """After a step; waits for nothing. A step in which no label counts changes nothing.

        Args:
            found_inf: whether a gradient was not finite, bool scalar; None: all were.
            count: samples or tokens whose losses were summed in the global batch.
        """
        if self._is_first:
            self._is_first = False
            assert self._num_tokens is not None
            mantissa, _ = torch.frexp(count)  # between 1/2 and 1, so that what follows is exact
            below = (count / mantissa / 2).float()
            self._num_tokens = torch.where(count.isfinite() & (count >= 1), below, self._num_tokens)
        found = torch.zeros((), device=self.scale.device) if found_inf is None else found_inf.float()
        before = self.scale.clone(), self._growth_tracker.clone()
        torch._amp_update_scale_(self.scale, self._growth_tracker, found, GROWTH, BACKOFF, self._growth_interval)
        for value, old in zip((self.scale, self._growth_tracker), before, strict=True):
            value.copy_(torch.where(count == 0, old, value))

    def state_dict(self) -> dict[str, float]:
        """Waits for the device."""
        state = {"scale": self.scale.item(), "growth_tracker": int(self._growth_tracker.item())}
        return state if self._num_tokens is None else {**state, "num_tokens": int(self._num_tokens.item())}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Take back what `state_dict` gave, under any plan."""
        self.scale.fill_(state["scale"])
        self._growth_tracker.fill_(state["growth_tracker"])
        self._num_tokens = torch.full_like(self.scale, state["num_tokens"]) if "num_tokens" in state else None
        self._is_first = False


def tokens_per_sample(batch: Any) -> int:
    """Tokens of a sample as the shapes have it: dim 1 of [batch, tokens] integers and of [batch, tokens, features].

    1 for anything else: a sample is the unit then.
    """
    _, x = next(tensors(model_input(batch)), (None, None))
    if x is not None and (x.dim() == 3 or (x.dim() == 2 and not (x.is_floating_point() or x.is_complex()))):
        return max(1, int(x.shape[1]))
    return 1
