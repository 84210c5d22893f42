"""An optimizer's state of a parameter, begun anew in the midst of a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class StateAtStart:
    """What an optimizer that has made no step yet keeps of each parameter: of most nothing, as `step` makes it when it
    finds none; Adagrad makes it at once.

    Memory: of a tensor whose numbers are all the same, one of them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._held = {
            param: {name: _small(value) for name, value in of_param.items()}
            for param, of_param in optimizer.state.items()
            if isinstance(param, Tensor)
        }

    def restore(self, params: Iterable[nn.Parameter]) -> None:
        """Forget what steps have made of these parameters' state."""
        for param in params:
            self._optimizer.state.pop(param, None)
            if param in self._held:
                self._optimizer.state[param] = {name: _whole(value) for name, value in self._held[param].items()}


def _small(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    if value.numel() and bool((value == value.flatten()[0]).all()):
        return value.flatten()[:1].clone().view([1] * value.dim()).expand(value.shape)
    return value.clone()


def _whole(value: Any) -> Any:
    return value.clone(memory_format=torch.contiguous_format) if isinstance(value, Tensor) else value
