"""Of what dtype a run stores, computes, reduces and updates."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Precision:
    """The policy of a run.

    Attributes:
        params: of stored parameters.
        compute: of products and of the activations between them. Where it is low, a model runs under `torch.autocast`
            of it; what loses by it (norms, softmax statistics, losses) computes in float32 inside.
        reduce: in which gradients are summed over ranks.
        optimizer: of the optimizer's state, and of the copy of the parameters that it updates where that is not params.
    """

    params: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    optimizer: torch.dtype = torch.float32

    @classmethod
    def from_config(cls, section: Any) -> Precision:
        """Of a ``train.precision`` section."""
        return cls(*(DTYPES[getattr(section, key)] for key in ("params", "compute", "reduce", "optimizer")))

    @property
    def data(self) -> torch.dtype:
        """Of a batch's numbers, of buffers and of the parameters of norms, which are not rounded to low parameters."""
        return self.optimizer

    @property
    def gradients(self) -> torch.dtype:
        """In which gradients are accumulated over microbatches: that of the optimizer where parameters are narrower."""
        return self.optimizer

    def reduce_dtype(self, gradient: torch.dtype) -> torch.dtype:
        """In which gradients that are accumulated in this dtype are summed over ranks."""
        return gradient if gradient == torch.float64 or gradient.is_complex else self.reduce

    def autocast(self, device: torch.device) -> AbstractContextManager[None]:
        """Around what a model computes; may be entered any number of times."""
        return torch.autocast(device.type, self.compute) if self.is_low else nullcontext()

    @property
    def is_low(self) -> bool:
        """Whether products are taken in bfloat16 or float16."""
        return self.compute in LOW

    @property
    def scales_loss(self) -> bool:
        """Whether gradients would vanish without a scaled loss."""
        return self.compute == torch.float16
