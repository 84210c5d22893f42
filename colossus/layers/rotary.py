"""Rotary positions (2104.09864), in the half-split form of GPT-NeoX and Llama."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from colossus.context.parallel_context import current_context
from colossus.error_place import located_error
from colossus.layers.block_options import RotaryScaling
from colossus.layers.kv_cache import KeyValueCache
from colossus.layers.model_parallel import model_parallel_of


class Rotary(nn.Module):
    """Rotates pairs (i, i + d/2) of each head by position * base^(-2i/d). Input and output [.., tokens, head_dim].

    The cosines and sines of one (head_dim, base, scaling), dtype and device are one table in a context, which all of
    its layers share: that of the most tokens so far, or of the last positions that were given.

    Args:
        scaling: of the frequencies, for sequences longer than those a model was first trained on.

    Raises:
        ValueError: for an odd head_dim, or a base that is not above 1.
    """

    def __init__(self, head_dim: int, base: float = 10000.0, scaling: RotaryScaling | None = None) -> None:
        super().__init__()
        if head_dim % 2:
            raise located_error(f"rotary positions need an even head size, not {head_dim}")
        if not base > 1:
            raise located_error(f"rotary positions: base = {base} is not above 1 (10000 is common)")
        self.head_dim, self.base, self.scaling = head_dim, base, scaling
        self._kind = f"{type(self).__module__}.{type(self).__qualname__} {head_dim} {base} {scaling}"
        self.parallel = model_parallel_of(current_context())

    def _cos_sin_of(
        self, tokens: int, dtype: torch.dtype, device: torch.device, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # a cache by the length would be of one length
            return self._compute(torch.arange(tokens, device=device) if positions is None else positions, dtype)
        tables, key = self.parallel.rotary_tables, (self._kind, dtype, device)
        table = tables.get(key)
        if table is None or table[2] is not positions or len(table[0]) < tokens:
            with torch.inference_mode(False):  # what a validation leaves here, training saves for backward
                indices = torch.arange(tokens, device=device) if positions is None else positions
                table = tables[key] = (*self._compute(indices, dtype), positions)
        cos, sin, _ = table
        return (cos, sin) if len(cos) == tokens else (cos[:tokens], sin[:tokens])

    def _compute(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions.to(torch.float64)[:, None] * self.frequencies(positions.device)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def frequencies(self, device: torch.device) -> Tensor:
        """Radians per token of each pair, [head_dim / 2], in float64; a subclass may have others."""
        if self.scaling is None:
            steps = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=device) / self.head_dim
            return self.base**-steps
        scaled = [self.scaling.scale(self.base ** (-i / self.head_dim)) for i in range(0, self.head_dim, 2)]
        return torch.tensor(scaled, dtype=torch.float64).to(device, non_blocking=True)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """``positions`` [tokens], the same object as long as it has the same values; None is 0, 1, 2, ..."""
        return rotate(x, *self.cos_sin(x, positions))

    def cos_sin(self, x: Tensor, positions: Tensor | None, cache: KeyValueCache | None = None) -> tuple[Tensor, Tensor]:
        """Cosines and sines [tokens, head_dim] for heads x, in float32 or wider.

        Args:
            cache: the tokens follow those that it has seen, whatever the positions.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        if cache is None:
            return self._cos_sin_of(x.shape[-2], wide, x.device, positions)
        cos, sin = cache.rows(
            (self._kind, wide), x.shape[-2], lambda count: self._compute(torch.arange(count, device=x.device), wide)
        )
        return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The heads x [.., tokens, head_dim], rotated; see `Rotary.cos_sin`."""
    low, high = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype)
