"""Multi-head attention on torch's scaled_dot_product_attention, heads split over the tensor ranks."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from colossus.comm.kept_results import products_without_values
from colossus.error_place import located_error
from colossus.layers.block_options import RotaryScaling, default_norm_eps
from colossus.layers.head_attention import HeadAttention
from colossus.layers.heads import ReplicatedKV
from colossus.layers.layer import call
from colossus.layers.linear import Linear
from colossus.layers.rotary import Rotary, rotate
from colossus.layout.parameter import Initializer
from colossus.registry import NORMS
from colossus.sequence_parallel.mask import CAUSAL, Mask
from colossus.sharded_tensor.placement import placement_of
from colossus.sharded_tensor.regions import require_sequences
from colossus.sharded_tensor.tensor import plain, wrap
from colossus.tensor_parallel.attention_heads import are_replicated, head_problems


class Attention(HeadAttention):
    """Self-attention, with grouped keys and values (2305.13245) when ``num_kv_heads`` < ``num_heads``.

    Shape:
        input and output [batch, tokens, hidden_size]; each rank computes heads / ranks of the heads. If key/value heads
        are fewer than the ranks, ranks / num_kv_heads neighbours have a copy of each.

        ``mask``: broadcastable to [batch, heads, tokens, tokens], True where a query may attend; its batch in the user
        layout, with all heads and tokens. Not under sequence parallelism, where each rank has only its tokens.

        ``documents``: integers [batch, tokens] in the whole layout: a token attends only to tokens with the same
        number. Padding is a document of its own, say -1.

    Args:
        head_dim: features of a head, by default hidden_size / num_heads.
        mask: what a token attends to, by positions: ``Mask.full()``, ``Mask.window(4095)`` (2310.06825, Mistral), and
            others; by default itself and all tokens before it.
        scale: of the scores, by default head_dim ** -0.5.
        soft_cap: the bound of the scores, soft_cap * tanh(score / soft_cap) (2408.00118, Gemma 2).
        sinks: a learned score of each head beside those of the keys, whose value is zero: ``sinks`` [heads] (gpt-oss).
        qk_norm: a norm of each query and key over its head_dim, with a weight [head_dim] each, before their rotation
            (2302.05442; as in Qwen3): a name in `colossus.registry.NORMS`; True is ``rmsnorm``.
        norm_eps: epsilon of these norms, by default 1e-6.
        rotary: rotate queries and keys by their positions (2104.09864).
        rotary_base: 10000 in Llama 2, 500000 in Llama 3.
        rotary_fraction: the part of a head's features that is rotated, the first ones (GPT-NeoX).
        rotary_scaling: scaling in Llama 3.1 and later, dict(factor=8.0, original_max_position_embeddings=8192), say;
            see `colossus.layers.block_options.RotaryScaling`.

    Raises:
        ValueError: heads without a head_dim do not divide hidden_size, the tensor ranks do not divide the heads, or
            key/value heads and ranks do not divide either way.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        bias: bool = True,
        *,
        head_dim: int | None = None,
        mask: Mask = CAUSAL,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: bool = False,
        dropout: float = 0.0,
        qk_norm: bool | str = False,
        norm_eps: float | None = None,
        rotary: bool = False,
        rotary_base: float = 10000.0,
        rotary_fraction: float = 1.0,
        rotary_scaling: RotaryScaling | Mapping[str, Any] | None = None,
        init: Initializer | None = None,
        out_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        hidden_size, num_heads = operator.index(hidden_size), operator.index(num_heads)
        kv = operator.index(num_kv_heads or num_heads)
        head_dim = None if head_dim is None else operator.index(head_dim)
        for problem in head_problems(hidden_size, num_heads, kv, head_dim, rotary=rotary):
            raise located_error(f"Attention: {problem}")
        scores: dict[str, Any] = dict(mask=mask, scale=scale, soft_cap=soft_cap, sinks=sinks, dropout=dropout)
        super().__init__(num_heads, kv, head_dim or hidden_size // num_heads, **scores, dtype=dtype)
        width = num_heads * self.head_dim
        sizes = {"query": width, "key": kv * self.head_dim, "value": kv * self.head_dim}
        inits: dict[str, Any] = dict(init=init, bias_init=bias_init, dtype=dtype)
        self.qkv: nn.Module
        if are_replicated(kv, self.parallel.shardings):
            self.qkv = ReplicatedKV(hidden_size, sizes, kv, bias, **inits)
        else:
            self.qkv = Linear(hidden_size, sizes, bias, split="column", **inits)
        self.out = Linear(width, hidden_size, bias, dtype=dtype, split="row", init=out_init, bias_init=bias_init)
        eps = default_norm_eps("rmsnorm") if norm_eps is None else norm_eps
        norm = NORMS.get("rmsnorm" if qk_norm is True else qk_norm) if qk_norm else lambda *_, **__: None
        self.q_norm, self.k_norm = (norm(self.head_dim, eps, dtype=dtype) for _ in range(2))
        scaling, rotated = RotaryScaling.of(rotary_scaling), int(self.head_dim * rotary_fraction)
        self.rotary = Rotary(rotated, rotary_base, scaling) if rotary else None

    def forward(self, x: Tensor, mask: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        if x.dim() < 3:
            raise located_error(
                f"{self.title}: x has shape {tuple(x.shape)}; it takes [batch, tokens, hidden_size] (x.unsqueeze(0))"
            )
        require_sequences(x)
        inner = self.parallel.regions.inner
        with products_without_values(self._only_exchanges_product()):
            outputs = call(self.qkv, x, self.parallel, inner, outputs=3)
        norms = self.q_norm, self.k_norm, None
        query, key, value = (self._heads(output, norm) for output, norm in zip(outputs, norms, strict=True))
        if self.rotary is not None:
            angles = self._angles(query)
            query, key = rotate(query, *angles), rotate(key, *angles)
        out = self._attention(query, key, value, mask, documents, x.shape[0])
        merged = wrap(out.transpose(-3, -2).flatten(-2), placement_of(outputs[0]))
        y: Tensor = call(self.out, merged, self.parallel)
        return y

    def _only_exchanges_product(self) -> bool:
        """Return whether nothing saves queries, keys and values before an exchange of heads (Ulysses)."""
        sequence = self.parallel.sequence
        is_plain = type(self.qkv) is Linear and not self.qkv._forward_hooks and self.q_norm is None
        return sequence is not None and sequence.ulysses.size > 1 and is_plain

    def _heads(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        """Return [.., tokens, heads * head_dim] as this rank's heads [.., heads, tokens, head_dim], each normed."""
        x = plain(x) if norm is None else x
        heads = x.view((*x.shape[:-1], -1, self.head_dim))
        return plain(heads if norm is None else norm(heads)).transpose(-3, -2)
