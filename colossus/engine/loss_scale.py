"""Dynamic scaling of the loss: gradients of float16 vanish below 6e-8 and overflow above 65504."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from colossus.comm.objects import all_gather_object
from colossus.config.training import LossScale
from colossus.context.parallel_context import ParallelContext
from colossus.engine.inputs import model_input
from colossus.gradients.host_transfer import LateValue
from colossus.nest import tensors

GROWTH, BACKOFF = 2.0, 0.5
#: a gradient of the mean loss that overflows at this scale is above 1e9, the 30th halving of torch's first scale
SMALLEST_SCALE = 2.0**-14


class LossScaler:
    """The scale of the loss as `torch.amp.GradScaler` has it: doubled after a number of steps without an overflow,
    halved by each, whose step is skipped (Micikevicius et al., 1710.03740, section 3.2).

    It is the scale of the gradient of the *mean* loss, as there. The engine backpropagates sums, which are larger by
    the number of tokens; so a loss is multiplied by the scale over n, a power of two near that number: a division by it
    is exact. In the first step it is guessed from the shapes of the batch, agreed on by all ranks, and from then on it
    is what the loss function counted in that step: the same under every plan.

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
        #: whether that is a count, not a guess by shapes: on the device, and as far as the host knows
        self._has_count = torch.zeros((), dtype=torch.bool, device=context.device)
        self._late_has_count = LateValue()
        self._is_counted = False
        self.factor: Tensor | None = None

    def begin_step(self, batch: Any) -> Tensor:
        """The `factor` of the step of this batch of a data rank. Collective before the first step."""
        if self._num_tokens is None:
            world = self._context.group(self._context.grid.names)
            own = self._batch_size * tokens_per_sample(batch)
            self._num_tokens = self._on_device(power_of_two_below(max(all_gather_object(own, world))))
        self.factor = self.scale / self._num_tokens
        return self.factor

    def update(self, found_inf: Tensor | None, count: Tensor) -> None:
        """After a step; waits for nothing.

        Args:
            count: samples or tokens whose losses were summed in the global batch.
            found_inf: whether a gradient was not finite, bool scalar; None: all were.
        """
        found = torch.zeros((), device=self.scale.device) if found_inf is None else found_inf.float()
        if not self._is_counted:
            self._take_count(count)
        torch._amp_update_scale_(self.scale, self._growth_tracker, found, GROWTH, BACKOFF, self._growth_interval)

    def _take_count(self, count: Tensor) -> None:
        """The number of tokens is that of the first step that has one."""
        assert self._num_tokens is not None
        takes = self._has_count.logical_not() & count.isfinite() & (count >= 1)
        mantissa, _ = torch.frexp(torch.where(takes, count, 1.0))  # between 1/2 and 1
        below = torch.where(takes, count, 1.0) / mantissa / 2  # exact: a power of two
        self._num_tokens = torch.where(takes, below.float(), self._num_tokens)
        self._has_count = self._has_count | takes
        self._is_counted = bool(self._late_has_count.push(self._has_count.float()))

    def _on_device(self, number: float) -> Tensor:
        return torch.full((), number, dtype=torch.float32, device=self.scale.device)

    def state_dict(self) -> dict[str, float]:
        """Waits for the device."""
        state = {"scale": self.scale.item(), "growth_tracker": int(self._growth_tracker.item())}
        return state if self._num_tokens is None else {**state, "num_tokens": int(self._num_tokens.item())}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Take back what `state_dict` gave, under any plan."""
        self.scale.fill_(state["scale"])
        self._growth_tracker.fill_(state["growth_tracker"])
        self._num_tokens = self._on_device(state["num_tokens"]) if "num_tokens" in state else None
        self._is_counted = self._num_tokens is not None
        self._has_count.fill_(self._is_counted)
        self._late_has_count = LateValue()


def tokens_per_sample(batch: Any) -> int:
    """Tokens of a sample as the shapes have it: dim 1 of [batch, tokens] integers and of [batch, tokens, features].

    1 for anything else: a sample is the unit then.
    """
    for _, x in tensors(model_input(batch)):
        if x.dim() == 3 or (x.dim() == 2 and not (x.is_floating_point() or x.is_complex())):
            return max(1, int(x.shape[1]))
        break
    return 1


def power_of_two_below(number: int) -> int:
    """The largest power of two that is not above ``number``."""
    return 1 << (max(1, number).bit_length() - 1)
