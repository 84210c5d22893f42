"""Multi-head attention on torch's scaled_dot_product_attention, heads split over the tensor ranks."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colossus.comm.kept_results import kept, products_without_values
from colossus.construct.initial_values import Constant
from colossus.error_place import located_error
from colossus.layers.attention_weights import attend_by_weights, both, same_document
from colossus.layers.block_options import RotaryScaling, default_norm_eps
from colossus.layers.dropout import Dropout
from colossus.layers.heads import ReplicatedKV
from colossus.layers.kv_cache import KeyValueCache
from colossus.layers.layer import Layer, call
from colossus.layers.linear import Linear
from colossus.layers.rotary import Rotary, rotate
from colossus.layout.activation import Activation
from colossus.layout.layout import Layout
from colossus.layout.moves import moves
from colossus.layout.parameter import Initializer
from colossus.registry import NORMS
from colossus.sequence_parallel.attend import attend
from colossus.sequence_parallel.mask import CAUSAL, FULL, Mask
from colossus.sequence_parallel.tiles import TILE, visible
from colossus.sharded_tensor.placement import Place, Placement, local_mask, placement_of
from colossus.sharded_tensor.regions import local, require_sequences
from colossus.sharded_tensor.tensor import plain, wrap
from colossus.tensor_parallel.attention_heads import are_replicated, head_problems, indivisible_heads, uneven_kv_heads
from colossus.tensor_parallel.dtypes import to_product_dtype
from colossus.tensor_parallel.move_plan import MovePlan, run

_IDS = torch.int64
#: document of the tokens that pad a sequence: a number that no user gives to a document
_PADDING = torch.iinfo(_IDS).min


class Attention(Layer):
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
        super().__init__()
        hidden_size, num_heads = operator.index(hidden_size), operator.index(num_heads)
        kv = operator.index(num_kv_heads or num_heads)
        head_dim = None if head_dim is None else operator.index(head_dim)
        for problem in head_problems(hidden_size, num_heads, kv, head_dim, rotary=rotary):
            raise located_error(f"Attention: {problem}")
        shardings = self.parallel.shardings
        for size in indivisible_heads(num_heads, kv, shardings) if shardings is not None else ():
            if size.name == "num_kv_heads" and kv < size.ways:
                raise located_error(f"Attention: {uneven_kv_heads(kv, size.ranks)}")
            raise located_error(f"Attention: {size}; a head cannot be split")
        self.head_dim, self.mask = head_dim or hidden_size // num_heads, mask
        self.num_heads, self.num_kv_heads = num_heads, kv
        width = num_heads * self.head_dim
        sizes = {"query": width, "key": kv * self.head_dim, "value": kv * self.head_dim}
        inits: dict[str, Any] = dict(init=init, bias_init=bias_init, dtype=dtype)
        self.qkv: nn.Module
        if are_replicated(kv, shardings):
            self.qkv = ReplicatedKV(hidden_size, sizes, kv, bias, **inits)
        else:
            self.qkv = Linear(hidden_size, sizes, bias, split="column", **inits)
        self.out = Linear(width, hidden_size, bias, dtype=dtype, split="row", init=out_init, bias_init=bias_init)
        eps = default_norm_eps("rmsnorm") if norm_eps is None else norm_eps
        norm = NORMS.get("rmsnorm" if qk_norm is True else qk_norm) if qk_norm else lambda *_, **__: None
        self.q_norm, self.k_norm = (norm(self.head_dim, eps, dtype=dtype) for _ in range(2))
        if isinstance(rotary_scaling, Mapping):
            rotary_scaling = RotaryScaling(**rotary_scaling)
        rotated = int(self.head_dim * rotary_fraction)
        self.rotary = Rotary(rotated, rotary_base, rotary_scaling) if rotary else None
        self.dropout: nn.Module = Dropout(dropout)
        self._make_scores(scale, soft_cap, sinks, dtype)

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

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, documents: Tensor | None, batch: int
    ) -> Tensor:
        """Return the attention of this rank's heads and tokens, [batch, heads, tokens, head_dim].

        Args:
            batch: samples of this rank in the whole layout.
        """
        inner = self.parallel.regions.inner
        if documents is not None:
            documents = self._local_documents(local(documents), inner)
        if (cache := self._cache(mask, documents)) is not None:
            return cache.attend(self, query, key, value, self.mask, **self._score_options())
        if self.parallel.sequence is not None:
            return self._attend_over_sequence_ranks(query, key, value, mask, documents)
        return self._attend(query, key, value, self._local_mask(mask, batch), documents, inner)

    def _cache(self, mask: Tensor | None, documents: Tensor | None) -> KeyValueCache | None:
        """Return the cache of a model that decodes, or None."""
        cache = self.parallel.batch_info.cache
        is_plain = mask is None and documents is None and self.mask.is_causal and self.parallel.sequence is None
        if cache is not None and not is_plain:
            raise located_error(
                f"{self.title}: with a key/value cache a token attends to tokens before it, so a tensor as a mask, "
                f"documents, masks that are not causal and parallel.sequence do not work: call the model with whole "
                f"sequences"
            )
        return cache

    def _angles(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of this rank's tokens, see `colossus.layers.rotary.Rotary.cos_sin`."""
        if not isinstance(self.rotary, Rotary) or type(self.rotary).forward is not Rotary.forward:
            raise located_error(
                f"{self.title}: its rotary is a {type(self.rotary).__name__}, which is not called: for other angles "
                f"use a subclass of colossus.layers.rotary.Rotary with its own frequencies()"
            )
        cache = self.parallel.batch_info.cache
        return self.rotary.cos_sin(query, self._positions(query), 0 if cache is None else cache.num_tokens)

    def _make_scores(self, scale: float | None, soft_cap: float | None, sinks: bool, dtype: torch.dtype | None) -> None:
        self.scale, self.soft_cap, inner = scale, soft_cap, self.parallel.regions.inner
        layout, shape = Layout((inner.features,)), {"": (self.num_heads,)}
        self.sinks = self.make_parameter(shape, layout, Constant(0.0), dtype=dtype) if sinks else None
        self.decide_gradients(self.sinks, inner)

    def _only_exchanges_product(self) -> bool:
        """Return whether nothing saves queries, keys and values before an exchange of heads (Ulysses)."""
        sequence = self.parallel.sequence
        is_plain = type(self.qkv) is Linear and not self.qkv._forward_hooks and self.q_norm is None
        return sequence is not None and sequence.ulysses.size > 1 and is_plain

    def _positions(self, query: Tensor) -> Tensor | None:
        """Return the positions of this rank's tokens in the sequence, [tokens]; None for 0, 1, 2, ..."""
        sequence = self.parallel.sequence
        if sequence is None:
            return None
        tokens = self.parallel.regions.inner.tokens
        index, num_shards = self.context.index(tokens), self.context.size(tokens)
        return sequence.positions(query.shape[-2], index, num_shards, query.device)

    def _local_documents(self, documents: Tensor, inner: Activation) -> Tensor:
        """Return the documents of the samples and tokens that this rank computes."""
        user = self.parallel.regions.whole
        source, target = Layout((user.batch, user.tokens)), Layout((inner.batch, inner.tokens))
        plan = MovePlan.of(moves(source, target), self.context)
        return kept("the documents of tokens", lambda: run(plan.forward, documents).wait())

    def _attend_over_sequence_ranks(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        documents: Tensor | None,
    ) -> Tensor:
        sequence, positions = self.parallel.sequence, self._positions(query)
        assert sequence is not None
        assert positions is not None
        if mask is not None:
            raise located_error(
                f"{self.title}: a mask over whole sequences, but parallel.sequence splits them over "
                f"{sequence.num_shards} ranks: pass documents [batch, tokens], the number of the document that each "
                f"token belongs to (with padding as a document of its own)"
            )
        if self._dropout_rate():
            raise located_error(
                f"{self.title}: attention weights cannot have dropout under parallel.sequence: set it to 0, or put "
                f"dropout behind the attention"
            )
        num_tokens = self.parallel.batch_info.num_tokens
        total = query.shape[-2] * sequence.num_shards
        if num_tokens is not None and total != sequence.padded_length(num_tokens):
            raise ValueError(
                f"{self.title}: its input has {query.shape[-2]} tokens on each of {sequence.num_shards} ranks, but "
                f"the sequences of this batch have {num_tokens}: tokens of a tensor of another length are not split. "
                f"F.scaled_dot_product_attention can take it as keys and values"
            )
        if not self.mask.is_causal and num_tokens is not None and num_tokens < total:
            # padding is a document of its own; a causal query never attends to it
            if documents is None:
                documents = query.new_zeros((query.shape[0], len(positions)), dtype=_IDS)
            documents = documents.masked_fill(positions >= num_tokens, _PADDING)
        query, key, value = map(to_product_dtype, (query, key, value))
        options = self._score_options() | dict(documents=documents, chunks=sequence.chunks)
        return attend(query, key, value, sequence.ring, sequence.ulysses, mask=self.mask, **options)

    def _heads(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        """Return [.., tokens, heads * head_dim] as this rank's heads [.., heads, tokens, head_dim], each normed."""
        x = plain(x) if norm is None else x
        heads = x.view((*x.shape[:-1], -1, self.head_dim))
        return plain(heads if norm is None else norm(heads)).transpose(-3, -2)

    def _local_mask(self, mask: Tensor | None, batch: int) -> Tensor | None:
        if mask is None or self.parallel.shardings is None:
            return mask
        return local_mask(mask, batch, self.parallel.regions.inner, self.parallel)

    def _dropout_rate(self) -> float:
        """Return the rate of ``dropout``, which is not called: attention weights never leave torch's kernel."""
        if isinstance(self.dropout, nn.Identity):
            return 0.0
        if not isinstance(self.dropout, (Dropout, nn.Dropout) if self.context.world_size == 1 else Dropout):
            raise located_error(
                f"{self.title}: its dropout is a {type(self.dropout).__name__}, but attention weights stay inside "
                f"torch's kernel, which takes a rate: use colossus.layers.Dropout(p), or nn.Identity() for none"
            )
        return float(self.dropout.p) if self.training else 0.0

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        documents: Tensor | None,
        inner: Activation,
    ) -> Tensor:
        grouped = self.num_kv_heads != self.num_heads
        tokens, rate = query.shape[-2], self._dropout_rate()
        own, options = self.mask.within(tokens), self._score_options()
        is_plain = self.soft_cap is None and self.sinks is None
        in_tiles = own not in (CAUSAL, FULL) or (documents is not None and tokens > TILE) or not is_plain
        if in_tiles and mask is None and rate == 0.0:
            one_rank = self.context.group(())
            query, key, value = map(to_product_dtype, (query, key, value))
            return attend(query, key, value, one_rank, one_rank, mask=own, documents=documents, **options)
        if documents is not None:
            mask = both(same_document(documents), mask)
        causal = own == CAUSAL and mask is None
        dropout = self.dropout if rate > 0.0 and isinstance(self.dropout, Dropout) else None
        if own != FULL and (dropout is not None or not is_plain or not causal):
            positions = torch.arange(tokens, device=query.device)
            mask = both(visible(own, positions, positions), mask)
        if dropout is not None or not is_plain:
            heads = (("features", Place(query.dim() - 3)),) if inner.features else ()
            placement = Placement(self.parallel, inner, inner, heads)
            drop = None if dropout is None else partial(dropout.drop, placement=placement)
            return attend_by_weights(query, key, value, mask, drop, **options)
        return F.scaled_dot_product_attention(
            query, key, value, mask, rate, is_causal=causal, scale=self.scale, enable_gqa=grouped
        )

    def _score_options(self) -> dict[str, Any]:
        """Return the options of the scores beside the mask, with the sinks of this rank's heads."""
        with torch._C.DisableTorchFunctionSubclass():  # a `SplitParameter` is its local shard here
            sinks = None if self.sinks is None else self.sinks.view(-1)
        return dict(scale=self.scale, soft_cap=self.soft_cap, sinks=sinks)
