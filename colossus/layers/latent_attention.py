"""Latent attention (2405.04434): keys and values of all heads from one short vector a token, which decoding caches."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from colossus.error_place import located_error
from colossus.layers.block_options import RotaryScaling
from colossus.layers.head_attention import HeadAttention
from colossus.layers.kv_cache import KeyValueCache
from colossus.layers.layer import call
from colossus.layers.linear import Linear
from colossus.layers.norm import RMSNorm
from colossus.layers.rotary import Rotary, rotate
from colossus.layout.layout import Layout
from colossus.layout.parameter import Initializer
from colossus.layout.redistribute import move
from colossus.sequence_parallel.mask import CAUSAL, Mask
from colossus.sharded_tensor.placement import placement_of
from colossus.sharded_tensor.regions import require_sequences, unwrap
from colossus.sharded_tensor.tensor import plain, wrap
from colossus.tensor_parallel.choose_sharding import IndivisibleSize
from colossus.tensor_parallel.mode import MatmulSharding

#: output of the product down -> the name of its size
_SIZES = {"query": "q_rank", "latent": "kv_rank", "rotary": "rope_dim"}


class LatentAttention(HeadAttention):
    """Self-attention of DeepSeek-V2 (2405.04434) and V3: keys and values are products of one latent vector a token.

        latent, rotary      = down(x)                       [kv_rank], and [rope_dim], one rotary key for all heads
        key, value          = kv_up(kv_norm(latent))        heads x [nope_dim], heads x [value_dim]
        query               = q_up(q_norm(down(x)))         heads x [nope_dim + rope_dim]

    A head's key is its own ``nope_dim`` features with the rotary key behind them. Tensor ranks split the heads; latent
    and rotary key are whole on the ranks that do, and their gradients are summed over these.

    A cache of generation holds kv_rank + rope_dim numbers a token: new tokens then attend to the latents, with
    ``kv_up`` multiplied into queries and outputs.

    Shape:
        input and output [batch, tokens, hidden_size]. ``mask`` and ``documents`` are those of `Attention`.

    Args:
        kv_rank: features of the latent.
        q_rank: features between the two products of the queries; None: one product (DeepSeek-V2-Lite).
        nope_dim, rope_dim: features of a query and a key without and with rotary positions; pairs to rotate lie side by
            side, as in DeepSeek.
        value_dim: features of a value.
        bias: biases in ``down`` and ``out``.
        norm_eps: epsilon of both norms.
        mask, scale, soft_cap, sinks, dropout, rotary_base, rotary_scaling: see `Attention`; by default
            ``scale`` has the factor that DeepSeek's ``mscale_all_dim`` gives it.

    Raises:
        ValueError: the tensor ranks do not divide the heads; an odd rope_dim.
    """

    is_reproducible = False

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        kv_rank: int,
        q_rank: int | None = None,
        nope_dim: int = 128,
        rope_dim: int = 64,
        value_dim: int = 128,
        bias: bool = False,
        mask: Mask = CAUSAL,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: bool = False,
        dropout: float = 0.0,
        norm_eps: float = 1e-6,
        rotary_base: float = 10000.0,
        rotary_scaling: RotaryScaling | Mapping[str, Any] | None = None,
        init: Initializer | None = None,
        out_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = tuple(map(operator.index, (hidden_size, num_heads, kv_rank, nope_dim, rope_dim, value_dim)))
        hidden_size, num_heads, kv_rank, nope_dim, rope_dim, value_dim = sizes
        if value_dim > (head_dim := nope_dim + rope_dim):
            raise located_error(
                f"LatentAttention: value_dim = {value_dim} is above nope_dim + rope_dim = {head_dim}, the features of "
                f"a key: torch's kernels take values that are no longer than keys"
            )
        rotary_scaling = RotaryScaling.of(rotary_scaling)
        if scale is None and rotary_scaling is not None:
            scale = head_dim**-0.5 * rotary_scaling.score_factor
        scores: dict[str, Any] = dict(mask=mask, scale=scale, soft_cap=soft_cap, sinks=sinks, dropout=dropout)
        super().__init__(num_heads, num_heads, head_dim, **scores, dtype=dtype)
        self.kv_rank, self.nope_dim, self.rope_dim, self.value_dim = kv_rank, nope_dim, rope_dim, value_dim
        inits: dict[str, Any] = dict(init=init, bias_init=bias_init, dtype=dtype)
        low = {} if q_rank is None else {"query": operator.index(q_rank)}
        self.down = Down(hidden_size, {**low, "latent": kv_rank, "rotary": rope_dim}, bias, **inits)
        self.q_norm = None if q_rank is None else RMSNorm(q_rank, norm_eps, dtype=dtype)
        self.q_up = Linear(q_rank or hidden_size, num_heads * head_dim, False, split="column", **inits)
        self.kv_norm = RMSNorm(kv_rank, norm_eps, dtype=dtype)
        self.kv_up = Linear(kv_rank, num_heads * (nope_dim + value_dim), False, split="column", **inits)
        self.out = Linear(
            num_heads * value_dim, hidden_size, bias, dtype=dtype, split="row", init=out_init, bias_init=bias_init
        )
        self.rotary = Rotary(rope_dim, rotary_base, rotary_scaling)

    def forward(self, x: Tensor, mask: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        require_sequences(x)
        num_outputs = 2 if self.q_norm is None else 3
        *low, latent, shared = call(self.down, x, self.parallel, outputs=num_outputs)
        queries = x if self.q_norm is None else call(self.q_norm, low[0], self.parallel)
        product = call(self.q_up, queries, self.parallel, self.parallel.regions.inner)
        latent = call(self.kv_norm, latent, self.parallel)
        nope, rope = self._split(product, self.head_dim).split((self.nope_dim, self.rope_dim), -1)
        angles = self._angles(rope)
        query = torch.cat((nope, rotate(_pairs_apart(rope), *angles)), -1)
        key = rotate(_pairs_apart(self._for_all_heads(shared)), *angles)
        cache = self._cache(mask, documents)
        if cache is not None and cache.num_tokens:
            out = self._attend_to_latents(cache, query, self._stored(cache, latent, key))
        else:
            if cache is not None:
                self._stored(cache, latent, key)
            up = self._split(call(self.kv_up, latent, self.parallel, self.parallel.regions.inner), None)
            nope, value = up.split((self.nope_dim, self.value_dim), -1)
            key = torch.cat((nope, key.expand(*nope.shape[:-1], -1)), -1)
            # the kernels take one size of heads
            value = F.pad(value, (0, self.head_dim - self.value_dim))
            if cache is None:
                out = self._attention(query, key, value, mask, documents, x.shape[0])
            else:
                out = self._attend(query, key, value, None, None, self.parallel.regions.inner)
            out = out[..., : self.value_dim]
        merged = wrap(out.transpose(-3, -2).flatten(-2), placement_of(product))
        y: Tensor = call(self.out, merged, self.parallel)
        return y

    def _split(self, product: Tensor, size: int | None) -> Tensor:
        """Return [.., tokens, features] as this rank's heads [.., heads, tokens, ``size``]."""
        x = plain(product)
        return x.unflatten(-1, (-1, size or self.nope_dim + self.value_dim)).transpose(-3, -2)

    def _for_all_heads(self, x: Tensor) -> Tensor:
        """Return [batch, tokens, features] as one head of this rank's samples and tokens, with all features.

        The heads of a rank give it an addend of its gradient: it is summed over the ranks that split heads.
        """
        local, placement = unwrap(x, self.parallel)
        inner = self.parallel.regions.inner
        target = replace(inner, features=(), grad_partial=inner.features)
        return move(local, placement.activation, target, self.context).unsqueeze(-3)

    def _stored(self, cache: KeyValueCache, latent: Tensor, key: Tensor) -> Tensor:
        """Return latents and rotary keys of all tokens, [batch, 1, tokens, kv_rank + rope_dim], new ones included."""
        new = torch.cat((self._for_all_heads(latent), key), -1)
        return cache.extend(self, new, new[..., :0])[0]

    def _attend_to_latents(self, cache: KeyValueCache, query: Tensor, stored: Tensor) -> Tensor:
        """Return the outputs of new tokens, [batch, heads, tokens, value_dim], without the keys and values of others.

        q . (W l) = (W^T q) . l, and the sum of weighted values W l is W times the sum of weighted latents.
        """
        to_key, to_value = cache.derived(self, self._up_weights)
        nope, rope = query.split((self.nope_dim, self.rope_dim), -1)
        query = torch.cat((torch.einsum("bhtn,hnr->bhtr", nope, to_key), rope), -1)
        latents = stored[..., : self.kv_rank]
        options = self._score_options() | {"scale": self.head_dim**-0.5 if self.scale is None else self.scale}
        out = cache.attend_to_past(query, stored, latents, self.mask, **options)
        return torch.einsum("bhtr,hvr->bhtv", out, to_value)

    def _up_weights(self) -> tuple[Tensor, Tensor]:
        """Return the weights of this rank's heads, [heads, nope_dim, kv_rank] and [heads, value_dim, kv_rank].

        They are what ``kv_up`` makes of unit vectors, whatever the tensor mode and whatever adapts it.
        """
        inner = self.parallel.regions.inner
        samples = self.context.size(inner.batch) if inner.batch else 1  # the modes exchange equally many
        parameter = next(self.kv_norm.parameters())
        unit = torch.eye(self.kv_rank, dtype=parameter.dtype, device=parameter.device)
        up = self._split(call(self.kv_up, unit.expand(samples, -1, -1), self.parallel, inner), None)[0]
        to_key, to_value = up.mT.split((self.nope_dim, self.value_dim), -2)
        return to_key.contiguous(), to_value.contiguous()


class Down(Linear):
    """The product of x down to the latents, small beside all others.

    Where features are whole between blocks (1D) each rank multiplies its own tokens by the whole weight, so that
    latents are all that the ranks exchange.
    """

    def choose_sharding(
        self, split: str | None, in_features: int, outputs: Mapping[str, int], *, padded: bool = False
    ) -> MatmulSharding | None:
        shardings = self.parallel.shardings
        if shardings is None:
            return None
        own, weight = shardings.regions.residual, Layout.whole(2)
        if not own.features:
            return MatmulSharding(x=own, weight=weight, gathered_weight=weight, y=own)
        ways = shardings.ways(own.features)
        for name, size in outputs.items():
            if size % ways:
                raise located_error(f"LatentAttention: {IndivisibleSize(_SIZES[name], size, own.features, ways)}")
        return super().choose_sharding(split, in_features, outputs, padded=padded)


def _pairs_apart(x: Tensor) -> Tensor:
    """Return features 0, 1, 2, 3, .. in the order 0, 2, .., 1, 3, .., in which `rotate` takes pairs."""
    return x.unflatten(-1, (-1, 2)).transpose(-2, -1).flatten(-2)
