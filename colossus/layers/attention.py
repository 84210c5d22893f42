"""Multi-head attention on torch's scaled_dot_product_attention, heads split over the tensor ranks."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colossus.comm.kept_results import kept, products_without_values
from colossus.error_place import located_error
from colossus.layers.block_options import RotaryScaling, default_norm_eps
from colossus.layers.dropout import Dropout
from colossus.layers.heads import ReplicatedKV
from colossus.layers.kv_cache import KeyValueCache, past_tokens
from colossus.layers.layer import Layer, call
from colossus.layers.linear import Linear
from colossus.layers.norm import RMSNorm
from colossus.layers.rotary import Rotary, rotate
from colossus.layout.activation import Activation
from colossus.layout.layout import Layout
from colossus.layout.moves import moves
from colossus.layout.parameter import Initializer
from colossus.sequence_parallel.attend import attend
from colossus.sequence_parallel.tiles import TILE
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
        window: a token attends to itself and the ``window - 1`` tokens before it (2310.06825, Mistral); only
            with ``causal``. By default all tokens before it.
        qk_norm: RMSNorm of each query and key over its head_dim, with a weight [head_dim] each, before their rotation
            (2302.05442; as in Qwen3).
        norm_eps: epsilon of these norms, by default 1e-6.
        rotary: rotate queries and keys by their positions (2104.09864).
        rotary_base: 10000 in Llama 2, 500000 in Llama 3.
        rotary_scaling: scaling in Llama 3.1 and later, dict(factor=8.0, original_max_position_embeddings=8192), say.

    Raises:
        ValueError: heads without a head_dim do not divide hidden_size, the tensor ranks do not divide the heads, or
            key/value heads and ranks do not divide either way; a window that is not causal.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        bias: bool = True,
        *,
        head_dim: int | None = None,
        causal: bool = True,
        window: int | None = None,
        dropout: float = 0.0,
        qk_norm: bool = False,
        norm_eps: float | None = None,
        rotary: bool = False,
        rotary_base: float = 10000.0,
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
        if window is not None and (not causal or operator.index(window) < 1):
            why = "must be at least 1" if causal else "needs causal=True: a token sees itself and those before it"
            raise located_error(f"Attention: window = {window} {why}")
        self.head_dim, self.window = head_dim or hidden_size // num_heads, window
        self.num_heads, self.num_kv_heads, self.causal = num_heads, kv, causal
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
        self.q_norm, self.k_norm = (RMSNorm(self.head_dim, eps, dtype=dtype) if qk_norm else None for _ in range(2))
        if isinstance(rotary_scaling, Mapping):
            rotary_scaling = RotaryScaling(**rotary_scaling)
        self.rotary = Rotary(self.head_dim, rotary_base, rotary_scaling) if rotary else None
        self.dropout: nn.Module = Dropout(dropout)

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
            return cache.attend(self, query, key, value, self.window)
        if self.parallel.sequence is not None:
            return self._attend_over_sequence_ranks(query, key, value, mask, documents)
        return self._attend(query, key, value, self._local_mask(mask, batch), documents, inner)

    def _cache(self, mask: Tensor | None, documents: Tensor | None) -> KeyValueCache | None:
        """Return the cache of a model that decodes, or None."""
        cache = self.parallel.batch_info.cache
        is_plain = mask is None and documents is None and self.causal and self.parallel.sequence is None
        if cache is not None and not is_plain:
            raise located_error(
                f"{self.title}: with a key/value cache each token attends to all tokens before it, so a mask, "
                f"documents, causal=False and parallel.sequence do not work: call the model with whole sequences"
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
        if not self.causal and num_tokens is not None and num_tokens < total:
            # padding is a document of its own; a causal query never attends to it
            if documents is None:
                documents = query.new_zeros((query.shape[0], len(positions)), dtype=_IDS)
            documents = documents.masked_fill(positions >= num_tokens, _PADDING)
        query, key, value = map(to_product_dtype, (query, key, value))
        groups = sequence.ring, sequence.ulysses
        return attend(query, key, value, *groups, causal=self.causal, documents=documents, window=self.window)

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
        window = self.window if self.window is not None and self.window < tokens else None
        in_tiles = window is not None or (documents is not None and tokens > TILE)
        if in_tiles and mask is None and rate == 0.0:
            one_rank = self.context.group(())
            query, key, value = map(to_product_dtype, (query, key, value))
            return attend(query, key, value, one_rank, one_rank, causal=self.causal, documents=documents, window=window)
        if documents is not None:
            mask = _same_document(documents, mask)
        if self.causal and (mask is not None or window is not None):
            past = past_tokens(tokens, tokens, window, query.device)
            mask = _both(past, mask)
        causal = self.causal and mask is None
        if rate == 0.0 or not isinstance(self.dropout, Dropout):
            return F.scaled_dot_product_attention(query, key, value, mask, rate, is_causal=causal, enable_gqa=grouped)
        return self._attend_dropping(self.dropout, query, key, value, mask, inner)

    def _attend_dropping(
        self, dropout: Dropout, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, inner: Activation
    ) -> Tensor:
        """Return attention with dropped weights, as `Dropout` drops them; torch's kernel would draw its own mask.

        The weights [batch, heads, tokens, tokens] are kept for backward.
        """
        if mask is None and self.causal:
            mask = past_tokens(query.shape[-2], key.shape[-2], None, query.device)
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
        scores = (query * self.head_dim**-0.5) @ key.transpose(-2, -1)
        if mask is not None:
            scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, float("-inf"))
        weights = torch.ops.aten._safe_softmax(scores, -1)  # 0 for a query that may attend to nothing
        heads = (("features", Place(weights.dim() - 3)),) if inner.features else ()
        return dropout.drop(weights, Placement(self.parallel, inner, inner, heads)) @ value


def _same_document(documents: Tensor, mask: Tensor | None) -> Tensor:
    """Return [batch, 1, tokens, tokens], True where query and key share a document, combined with another mask."""
    return _both((documents[:, :, None] == documents[:, None, :])[:, None], mask)


def _both(sees: Tensor, mask: Tensor | None) -> Tensor:
    """Return a mask that is True, or what another mask adds to the scores, where ``sees`` is True."""
    if mask is None:
        return sees
    return sees & mask if mask.dtype == torch.bool else mask.masked_fill(~sees, float("-inf"))
