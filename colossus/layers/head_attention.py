"""Attention between its projections: the queries, keys and values of a rank's heads and tokens under every plan."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colossus.comm.kept_results import kept
from colossus.construct.initial_values import Constant
from colossus.error_place import located_error
from colossus.layers.attention_weights import attend_by_weights, both, same_document
from colossus.layers.dropout import Dropout
from colossus.layers.kv_cache import KeyValueCache
from colossus.layers.layer import Layer
from colossus.layers.model_parallel import ModelParallel
from colossus.layers.rotary import Rotary
from colossus.layout.activation import Activation
from colossus.layout.layout import Layout
from colossus.sequence_parallel.attend import attend
from colossus.sequence_parallel.mask import CAUSAL, FULL, Mask
from colossus.sequence_parallel.tiles import TILE, visible
from colossus.sharded_tensor.placement import Place, Placement, local_mask
from colossus.sharded_tensor.regions import local
from colossus.tensor_parallel.attention_heads import indivisible_heads, uneven_kv_heads
from colossus.tensor_parallel.dtypes import to_product_dtype
from colossus.tensor_parallel.move_plan import MovePlan, run

_IDS = torch.int64
#: document of the tokens that pad a sequence: a number that no user gives to a document
_PADDING = torch.iinfo(_IDS).min


class HeadAttention(Layer):
    """The base of layers of attention: masks, scores, positions, documents, and the cache of a model that decodes.

    A subclass makes queries, keys and values, [batch, heads, tokens, head_dim] each, and calls `_attention`.

    Attributes:
        rotary: the rotary positions of queries and keys; None: none.
    """

    is_reproducible = True

    rotary: nn.Module | None
    takes_plain_parameters = True

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        mask: Mask,
        scale: float | None,
        soft_cap: float | None,
        sinks: bool,
        dropout: float,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        shardings = self.parallel.shardings
        for size in indivisible_heads(num_heads, num_kv_heads, shardings) if shardings is not None else ():
            if size.name == "num_kv_heads" and num_kv_heads < size.ways:
                raise located_error(f"{type(self).__name__}: {uneven_kv_heads(num_kv_heads, size.ranks)}")
            raise located_error(f"{type(self).__name__}: {size}; a head cannot be split")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.mask, self.scale, self.soft_cap = mask, scale, soft_cap
        layout, shape = Layout((self.parallel.regions.inner.features,)), {"": (num_heads,)}
        self.sinks = self.make_parameter(shape, layout, Constant(0.0), dtype=dtype) if sinks else None
        self.decide_gradients(self.sinks, self.parallel.regions.inner)
        self.dropout: nn.Module = Dropout(dropout)

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, documents: Tensor | None, batch: int
    ) -> Tensor:
        """Return the attention of this rank's heads and tokens, [batch, heads, tokens, head_dim].

        Args:
            batch: samples of this rank in the whole layout.
        """
        inner = self.parallel.regions.inner
        if documents is not None:
            documents = local_documents(documents, self.parallel)
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

    def _positions(self, query: Tensor) -> Tensor | None:
        """Return the positions of this rank's tokens in the sequence, [tokens]; None for 0, 1, 2, ..."""
        sequence = self.parallel.sequence
        if sequence is None:
            return None
        tokens = self.parallel.regions.inner.tokens
        index, num_shards = self.context.index(tokens), self.context.size(tokens)
        return sequence.positions(query.shape[-2], index, num_shards, query.device)

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


def local_documents(documents: Tensor, parallel: ModelParallel) -> Tensor:
    """Return the documents of the samples and tokens that this rank computes, [batch, tokens]."""
    plan = MovePlan.of_tokens(parallel.regions.whole, parallel.regions.inner, 3, parallel.context)
    return kept("the documents of tokens", lambda: run(plan.forward, local(documents)).wait())
