"""The dtypes in which a run stores, computes, reduces and updates."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
#: dtypes of low precision: products in them run under autocast
LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Precision:
    """The dtypes of a run.

    Attributes:
        params: dtype of stored parameters.
        compute: dtype of products and of the activations between them. If it is low, a model runs under
            `torch.autocast`; norms, softmax statistics and losses then compute in float32 inside.
        reduce: dtype in which gradients are summed over ranks.
        optimizer: dtype of the optimizer's state, and of the copy of the parameters that it updates if that is not
            params.
    """

    params: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    optimizer: torch.dtype = torch.float32

    @classmethod
    def from_config(cls, section: Any) -> Precision:
        """Return the dtypes of a ``train.precision`` section."""
        return cls(*(DTYPES[getattr(section, key)] for key in ("params", "compute", "reduce", "optimizer")))

    @property
    def data(self) -> torch.dtype:
        """The dtype of a batch's floating-point tensors, of buffers and of the parameters of norms, which stay wide."""
        return self.optimizer

    @property
    def gradients(self) -> torch.dtype:
        """The dtype in which gradients are accumulated over microbatches, at least as wide as the parameters'."""
        return self.optimizer

    def reduce_dtype(self, gradient: torch.dtype) -> torch.dtype:
        """Return the dtype in which ranks sum gradients of this dtype: float64 and complex ones as they are."""
        return gradient if gradient == torch.float64 or gradient.is_complex else self.reduce

    def autocast(self, device: torch.device) -> AbstractContextManager[None]:
        """Return a context manager for a model's forward; it may be entered any number of times."""
        return torch.autocast(device.type, self.compute) if self.is_low else nullcontext()

    @property
    def is_low(self) -> bool:
        """Return whether products are computed in bfloat16 or float16."""
        return self.compute in LOW

    @property
    def scales_loss(self) -> bool:
        """Return whether the loss is scaled, without which small gradients would vanish."""
        return self.compute == torch.float16
