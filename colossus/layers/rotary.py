"""Rotary positions (2104.09864), in the half-split form of GPT-NeoX and Llama."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """Rotates pairs (i, i + d/2) of each head by position * base^(-2i/d). Input and output [.., tokens, head_dim].

    Raises:
        ValueError: for an odd head_dim.
    """

    def __init__(self, head_dim: int, base: float = 10000.0) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"rotary positions need an even head size, not {head_dim}")
        self.head_dim, self.base = head_dim, base
        self._tables: dict[tuple[int, torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    def _table(self, tokens: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        key = (tokens, dtype, device)
        if key not in self._tables:
            self._tables.clear()  # one length at a time
            steps = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=device) / self.head_dim
            angles = torch.arange(tokens, dtype=torch.float64, device=device)[:, None] * self.base**-steps
            angles = torch.cat((angles, angles), dim=-1)
            self._tables[key] = angles.cos().to(dtype), angles.sin().to(dtype)
        return self._tables[key]

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self._table(x.shape[-2], x.dtype, x.device)
        low, high = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-high, low), dim=-1) * sin
