"""Rotary positions (2104.09864), in the half-split form of GPT-NeoX and Llama."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from colossus.arithmetic import round_up
from colossus.context.parallel_context import current_context
from colossus.error_place import located_error
from colossus.layers.block_options import RotaryScaling
from colossus.layers.model_parallel import RotaryTable, model_parallel_of

#: positions by which the table grows when a model decodes
_MORE = 256


class Rotary(nn.Module):
    """A rotation of pairs (i, i + d/2) of each head by position * base^(-2i/d). Input, output [.., tokens, features].

    The d = head_dim first features are rotated, and others passed on.

    The cosines and sines of one (head_dim, base, scaling), dtype and device are one table in a context, which all of
    its layers share. It has the most tokens so far, or the last explicit positions.

    Args:
        scaling: scaling of the frequencies, for sequences longer than those of the first training.

    Raises:
        ValueError: head_dim is odd, or base is not above 1.
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

    def _compute(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions.to(torch.float64)[:, None] * self.frequencies(positions.device)
        angles = torch.cat((angles, angles), dim=-1)
        amplitude = 1.0 if self.scaling is None else self.scaling.amplitude
        return (angles.cos() * amplitude).to(dtype), (angles.sin() * amplitude).to(dtype)

    def frequencies(self, device: torch.device) -> Tensor:
        """Return the radians per token of each pair, [head_dim / 2], in float64; a subclass may have others."""
        if self.scaling is None:
            steps = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=device) / self.head_dim
            return self.base**-steps
        scaled = self.scaling.frequencies(self.base, self.head_dim)
        return torch.tensor(scaled, dtype=torch.float64).to(device, non_blocking=True)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return x rotated.

        Args:
            positions: [tokens], the same object as long as it has the same values; None is 0, 1, 2, ...
        """
        return rotate(x, *self.cos_sin(x, positions))

    def cos_sin(self, x: Tensor, positions: Tensor | None, first: int = 0) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [tokens, head_dim] for heads x, in float32 or wider.

        Args:
            first: the position of the first token; only without ``positions``.
        """
        tokens, dtype = x.shape[-2], torch.promote_types(x.dtype, torch.float32)
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # a compiled graph would keep a table of one length
            indices = torch.arange(first, first + tokens, device=x.device) if positions is None else positions
            return self._compute(indices, dtype)
        tables, key, span = self.parallel.rotary_tables, (self._kind, dtype, x.device), (first, tokens)
        table = tables.get(key)
        if table is None or table.positions is not positions or len(table.cos) < first + tokens:
            with torch.inference_mode(False):  # training may save a validation's table for backward
                count = round_up(first + tokens, _MORE) if first else tokens
                indices = torch.arange(count, device=x.device) if positions is None else positions
                table = RotaryTable(*self._compute(indices, dtype), positions)
        if table.span != span:
            with torch.inference_mode(False):
                rows = table.cos.narrow(0, *span), table.sin.narrow(0, *span)
            tables[key] = table = table._replace(span=span, rows=rows)
        return table.rows


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the heads x [.., tokens, features] with their first features rotated; see `Rotary.cos_sin`."""
    size = cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat((rotate(x[..., :size], cos, sin), x[..., size:]), dim=-1)
    low, high = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype)
