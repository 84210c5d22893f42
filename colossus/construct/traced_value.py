"""Initial values that a constructor gave to a tensor of which a rank stores a part: those of a swapped torch module."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from colossus.construct.init_trace import InitTrace
from colossus.layout.layout import Box
from colossus.layout.parameter import made_by_layer, spec_of


class TracedValue:
    """An `Initializer` whose values are those that the constructor which is traced gave to a tensor on meta.

    A rank computes the whole tensor, once, keeps its boxes and lets the rest go (`release`).

    Args:
        tensor: recorded by the trace of the build that runs.
        is_transposed: the parameter is its transpose.
    """

    def __init__(self, trace: InitTrace, tensor: Tensor, *, is_transposed: bool = False) -> None:
        self._trace: InitTrace | None = trace
        self.tensor: Tensor | None = tensor
        self._is_transposed = is_transposed

    def fix_seed(self, seed: int) -> None:
        """As of `InitTrace.fix_seed`: with what the tensor is drawn."""
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
        """Forget the whole tensor, of which all that is stored here has been drawn."""
        if self._trace is not None and self.tensor is not None and self.tensor.is_meta:
            self._trace.forget(self.tensor)
        self._trace = self.tensor = None


def traced_shards(parameter: Tensor) -> list[Any]:
    """Return the shards of a parameter whose values are those that a constructor gave to another tensor."""
    shards = spec_of(parameter).shards if made_by_layer(parameter) else ()
    return [shard for shard in shards if isinstance(shard.init, TracedValue)]
