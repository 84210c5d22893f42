"""Initial values from a constructor for a parameter that ranks split: those of a swapped torch module."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from colossus.construct.init_trace import InitTrace
from colossus.layout.layout import Box
from colossus.layout.parameter import made_by_layer, spec_of


class TracedValue:
    """An `Initializer` with the values that the traced constructor gave to a tensor on meta.

    A rank computes the whole tensor once, keeps its boxes and frees the rest (`release`).

    Args:
        tensor: a tensor that the current build's trace has recorded.
        is_transposed: the parameter is its transpose.
    """

    def __init__(self, trace: InitTrace, tensor: Tensor, *, is_transposed: bool = False) -> None:
        self._trace: InitTrace | None = trace
        self.tensor: Tensor | None = tensor
        self._is_transposed = is_transposed

    def fix_seed(self, seed: int) -> None:
        """Fix the seed of the tensor and of those that are drawn together with it; see `InitTrace.fix_seed`."""
        if self._trace is not None and self.tensor is not None:
            self._trace.fix_seed(self.tensor, seed)

    def __call__(self, key: int, shape: tuple[int, ...], box: Box) -> np.ndarray[Any, np.dtype[np.float64]]:
        assert self._trace is not None, "it is drawn once"
        assert self.tensor is not None
        whole = self._trace.value(self.tensor).detach()
        whole = whole.T if self._is_transposed else whole
        assert tuple(whole.shape) == shape
        return whole[tuple(slice(*span) for span in box)].to(torch.float64).numpy()

    def release(self) -> None:
        """Free the whole tensor once this rank has its boxes."""
        if self._trace is not None and self.tensor is not None and self.tensor.is_meta:
            self._trace.forget(self.tensor)
        self._trace = self.tensor = None


def traced_shards(parameter: Tensor) -> list[Any]:
    """Return the shards of a parameter whose values are those that a constructor gave to another tensor."""
    shards = spec_of(parameter).shards if made_by_layer(parameter) else ()
    return [shard for shard in shards if isinstance(shard.init, TracedValue)]
