"""What compressed sums of gradients keep from step to step: the errors that each rank has made, and starts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from colossus.context.precision import LOW
from colossus.gradients.host_transfer import send_to
from colossus.random import derive_seeds, hash_key

_ERROR, _WARM_START = "compression_error", "compression_start"
#: steps whose counts are remembered
_NUM_COUNTS = 8


@dataclass(eq=False)
class CompressionMemory:
    """Of all buckets of a run.

    What compression leaves out of a gradient is added to the next one (error feedback: 1901.09847, 1905.13727).

    Gradients are sums of scaled losses, divided by their count and the scale after they have been summed: so errors
    are kept divided, e. The divisor of a step is not known yet when its sums are made: it adds D' e, with D' the one
    that is expected, and has r left over. The sums are then divided by D, so of e they have paid D' / D, and

        e <- r / D + (1 - D' / D) e

    whatever D' was, nothing is lost. Its scale is known, its count is the smallest of the last 8 steps: the right one
    where counts are the same, else e is paid in parts; a step that has far fewer than expected would take far too much.
    A step that is skipped changes nothing.

    Args:
        stored: as what a parameter that compute sees is stored, by which its state is known.
        seed: of random starts.

    Attributes:
        step: number of the step that runs.
        expected: D', float64 scalar; None before the first step, where nothing is owed.
        errors: of each stored parameter, in its shape, divided; float32 or wider.
        starts: of some, PowerSGD's Q of the step before: the first numbers of a tensor of the parameter's shape.
    """

    stored: Callable[[nn.Parameter], nn.Parameter]
    seed: int
    step: int = 0
    expected: Tensor | None = None
    errors: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    starts: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    _scale: Tensor | None = None
    _counts: deque[Tensor] = field(default_factory=lambda: deque(maxlen=_NUM_COUNTS))
    _open: list[ErrorBuffer] = field(default_factory=list)
    _new_starts: dict[nn.Parameter, Tensor] = field(default_factory=dict)

    def begin(self, step: int, loss_scale: Tensor | None = None) -> None:
        """A step begins.

        Args:
            loss_scale: what its losses are multiplied by.
        """
        self.forget()
        self.step, self._scale, self.expected = step, loss_scale, None
        if self._counts:
            count = torch.stack(list(self._counts)).min()
            self.expected = count if loss_scale is None else count * loss_scale

    @torch.no_grad()
    def end(self, count: Tensor, found_inf: Tensor | None = None) -> None:
        """The step's sums have been divided by ``count`` and its scale, or it is skipped where ``found_inf``."""
        count = torch.where(count > 0, count.double(), 1.0)
        divisor = count if self._scale is None else count * self._scale
        stays = torch.zeros_like(divisor) if self.expected is None else 1.0 - self.expected / divisor
        comes = 1.0 / divisor
        if found_inf is not None:
            stays, comes = torch.where(found_inf, 1.0, stays), torch.where(found_inf, 0.0, comes)
        for buffer in self._open:
            buffer.flat.mul_(stays).add_(buffer.left.mul_(comes))
        for param, start in self._new_starts.items():
            old = self.starts.get(param)
            if found_inf is not None:  # random ones are drawn anew where there is none
                start = torch.where(found_inf, torch.zeros_like(start) if old is None else old, start)
            self.starts[param] = start
        self._counts.append(count)
        self.forget()

    def forget(self) -> None:
        """What the step that runs has left over."""
        self._open, self._new_starts = [], {}

    def take(self, buffer: ErrorBuffer) -> Tensor:
        """What is owed of a bucket, as the sums of the step that runs want it; `ErrorBuffer.left` is to be what this
        step leaves over. [elements of the bucket]"""
        self._open.append(buffer)
        buffer.left.zero_()
        return torch.zeros_like(buffer.flat) if self.expected is None else buffer.flat * self.expected

    def adopt(self, params: Sequence[nn.Parameter], views: Sequence[Tensor]) -> None:
        """From now on the errors of these parameters are in ``views``; what is known of them is copied there."""
        for param, view in zip(params, views, strict=True):
            key = self.stored(param)
            view.copy_(self.errors[key]) if key in self.errors else view.zero_()
            self.errors[key] = view

    def keep_start(self, param: nn.Parameter, start: Tensor) -> None:
        """Of the next step."""
        self._new_starts[self.stored(param)] = start

    def random_start(self, name: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The same on all ranks, another in each step."""
        (seed,) = derive_seeds(self.seed, (hash_key("powersgd", name), self.step))
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return send_to(device, drawn.to(dtype))

    def counts(self) -> list[float]:
        """Of the last steps."""
        return [float(count) for count in self._counts]

    def load_counts(self, counts: Sequence[float], device: torch.device) -> None:
        """Take back what `counts` gave."""
        self._counts.clear()
        self._counts.extend(torch.tensor(count, dtype=torch.float64, device=device) for count in counts)

    def state(self) -> dict[nn.Parameter, dict[str, Any]]:
        """By stored parameter."""
        found: dict[nn.Parameter, dict[str, Any]] = {}
        for name, held in ((_ERROR, self.errors), (_WARM_START, self.starts)):
            for param, value in held.items():
                found.setdefault(param, {})[name] = value
        return found

    def load(self, state: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        """Take back what `state` gave; what it does not have begins anew."""
        self.forget()
        for view in self.errors.values():
            view.zero_()
        self.starts = {param: held[_WARM_START] for param, held in state.items() if _WARM_START in held}
        for param, held in state.items():
            if _ERROR in held:
                if param in self.errors:
                    self.errors[param].copy_(held[_ERROR])
                else:
                    self.errors[param] = held[_ERROR]


class ErrorBuffer:
    """The errors of a bucket's parameters, side by side as their gradients are.

    Attributes:
        flat: [elements of the bucket, without flags], divided.
        left: what the step that runs has left over, of sums; as ``flat``.
        views: of each parameter, of ``flat``.
    """

    def __init__(self, params: Sequence[nn.Parameter], dtype: torch.dtype, memory: CompressionMemory) -> None:
        sizes, dtype = [param.numel() for param in params], torch.float32 if dtype in LOW else dtype
        self.flat = torch.zeros(sum(sizes), dtype=dtype, device=params[0].device)
        self.left = torch.zeros_like(self.flat)
        pieces = self.flat.split(sizes)
        self.views = [piece.view(param.shape) for piece, param in zip(pieces, params, strict=True)]
        memory.adopt(params, self.views)
