"""What compressed sums of gradients keep from step to step: the errors that each rank has made, and starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from colossus.random import derive_seeds, hash_key

_ERROR, _WARM_START = "compression_error", "compression_start"


@dataclass(eq=False)
class CompressionMemory:
    """Of all buckets of a run.

    What compression leaves out of a gradient is added to the next one (error feedback: 1901.09847, 1905.13727).

    Args:
        stored: as what a parameter that compute sees is stored, by which its state is known.
        seed: of random starts.

    Attributes:
        step: number of the step that runs.
        errors: of each stored parameter, in its shape.
        starts: of some, PowerSGD's Q of the step before: the first numbers of a tensor of the parameter's shape.
    """

    stored: Callable[[nn.Parameter], nn.Parameter]
    seed: int
    step: int = 0
    errors: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    starts: dict[nn.Parameter, Tensor] = field(default_factory=dict)

    def adopt(self, params: Sequence[nn.Parameter], views: Sequence[Tensor]) -> None:
        """From now on the errors of these parameters are in ``views``; what is known of them is copied there."""
        for param, view in zip(params, views, strict=True):
            key = self.stored(param)
            view.copy_(self.errors[key]) if key in self.errors else view.zero_()
            self.errors[key] = view

    def random_start(self, name: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The same on all ranks, another in each step."""
        (seed,) = derive_seeds(self.seed, (hash_key("powersgd", name), self.step))
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return drawn.to(device, dtype)

    def state(self) -> dict[nn.Parameter, dict[str, Any]]:
        """By stored parameter."""
        found: dict[nn.Parameter, dict[str, Any]] = {}
        for name, held in ((_ERROR, self.errors), (_WARM_START, self.starts)):
            for param, value in held.items():
                found.setdefault(param, {})[name] = value
        return found

    def load(self, state: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        """Take back what `state` gave; what it does not have begins anew."""
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
        flat: [elements of the bucket, without flags].
        views: of each parameter.
    """

    def __init__(self, params: Sequence[nn.Parameter], dtype: torch.dtype, memory: CompressionMemory) -> None:
        sizes = [param.numel() for param in params]
        self.flat = torch.zeros(sum(sizes), dtype=dtype, device=params[0].device)
        pieces = self.flat.split(sizes)
        self.views = [piece.view(param.shape) for piece, param in zip(pieces, params, strict=True)]
        memory.adopt(params, self.views)
