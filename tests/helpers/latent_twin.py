"""The oracle of latent attention: head by head in plain torch, with the same parameter names as our logical ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from colossus.layers.block_options import LatentOptions


class PlainLatentAttention(nn.Module):
    """Causal latent attention, with the rotation as a product of complex numbers."""

    def __init__(self, hidden: int, heads: int, sizes: LatentOptions, bias: bool = False, base: float = 1e4) -> None:
        super().__init__()
        self.heads, self.sizes, self.base = heads, sizes, base
        self.value_dim, s = sizes.value_dim, sizes
        down = {"query": s.q_rank, "latent": s.kv_rank, "rotary": s.rope_dim}
        self.down = nn.ModuleDict({name: nn.Linear(hidden, size, bias) for name, size in down.items() if size})
        if s.q_rank:
            self.q_norm = nn.RMSNorm(s.q_rank, 1e-6)
        self.kv_norm = nn.RMSNorm(s.kv_rank, 1e-6)
        self.q_up = nn.Linear(s.q_rank or hidden, heads * s.head_dim, False)
        self.kv_up = nn.Linear(s.kv_rank, heads * (s.nope_dim + s.value_dim), False)
        self.out = nn.Linear(heads * s.value_dim, hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        low = self.q_norm(self.down["query"](x)) if self.sizes.q_rank else x
        query = self.q_up(low).unflatten(-1, (self.heads, -1))
        up = self.kv_up(self.kv_norm(self.down["latent"](x))).unflatten(-1, (self.heads, -1))
        shared, nope = self.turn(self.down["rotary"](x)), self.sizes.nope_dim
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        out = []
        for head in range(self.heads):
            q, kv = query[..., head, :], up[..., head, :]
            scores = q[..., :nope] @ kv[..., :nope].mT + self.turn(q[..., nope:]) @ shared.mT
            scores = (scores / self.sizes.head_dim**0.5).masked_fill(future, float("-inf"))
            out.append(scores.softmax(-1) @ kv[..., nope:])
        return self.out(torch.cat(out, -1))

    def turn(self, x: Tensor) -> Tensor:
        """Return features 2i and 2i + 1 as one complex number, turned by position * base^(-2i / features)."""
        pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
        rates = self.base ** (-torch.arange(0, x.shape[-1], 2, dtype=torch.float64) / x.shape[-1])
        angles = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * rates
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2).to(x.dtype)
