"""Multi-head attention on torch's scaled_dot_product_attention, heads split over the tensor ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from colossus.layers.dropout import Dropout
from colossus.layers.layer import Layer
from colossus.layers.linear import Linear, coalesce_weights
from colossus.layers.rotary import Rotary
from colossus.layers.sharded import unwrap, wrap
from colossus.layout.activation import Activation
from colossus.layout.layout import Layout
from colossus.layout.moves import moves
from colossus.layout.parameter import Initializer
from colossus.layout.redistribute import redistribute
from colossus.sequence_parallel.attend import SequenceGroups, attend
from colossus.tensor_parallel.heads import head_misfits, head_problems, too_few_kv_heads
from colossus.tensor_parallel.route import Route, run

_IDS = torch.int64
#: document of the tokens that pad a sequence: no user's own, should he number them from 0 or from -1
_PADDING = torch.iinfo(_IDS).min


class Attention(Layer):
    """Self-attention, with grouped keys and values (2305.13245) when ``num_kv_heads`` < ``num_heads``.

    Shape:
        input and output [batch, tokens, hidden_size]; each rank computes its part of the heads.
        ``mask``: broadcastable to [batch, heads, tokens, tokens], True where a query may look; its batch as the user
        layout has it, heads and tokens whole. Not under sequence parallelism, where no rank has all tokens.
        ``documents``: [batch, tokens], whole numbers in the user layout: a token looks at those of its own document
        only. Padding is a document of its own, -1 say.

    Raises:
        ValueError: when heads do not divide hidden_size, or the tensor ranks do not divide the heads.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        bias: bool = True,
        *,
        causal: bool = True,
        dropout: float = 0.0,
        rotary: bool = False,
        init: Initializer | None = None,
        out_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv = num_kv_heads or num_heads
        for problem in head_problems(hidden_size, num_heads, kv, rotary=rotary):
            raise ValueError(f"Attention: {problem}")
        shardings = self.parallel.shardings
        for misfit in head_misfits(num_heads, kv, shardings) if shardings is not None else ():
            if misfit.what == "num_kv_heads" and kv < misfit.ways:
                raise ValueError(f"Attention: {too_few_kv_heads(kv, misfit.ways, misfit.ranks)}")
            raise ValueError(f"Attention: {misfit}; heads are split whole")
        self.head_dim = hidden_size // num_heads
        self.num_heads, self.num_kv_heads, self.causal = num_heads, kv, causal
        sizes = {"query": hidden_size, "key": kv * self.head_dim, "value": kv * self.head_dim}
        self.qkv = Linear(hidden_size, sizes, bias, dtype=dtype, split="column", init=init, bias_init=bias_init)
        self.out = Linear(hidden_size, hidden_size, bias, dtype=dtype, split="row", init=out_init, bias_init=bias_init)
        self.rotary = Rotary(self.head_dim) if rotary else None
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        local, source, output_layout = unwrap(x, self.parallel)
        return wrap(
            self.apply_local(local, source, output_layout, mask, documents), output_layout, output_layout, self.parallel
        )

    def apply_local(
        self,
        x: Tensor,
        source: Activation,
        target: Activation,
        mask: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        inner = self.parallel.regions.inner
        coalesce_weights(self, self.qkv, self.out)
        query, key, value = (self._heads(part) for part in self.qkv.apply_local(x, source, inner))
        places = self._places(query, inner)
        if self.rotary is not None:
            query, key = self.rotary(query, places), self.rotary(key, places)
        if documents is not None:
            documents = self._local_documents(documents, inner)
        if self.parallel.sequence is not None:
            mixed = self._attend_over_ranks(query, key, value, mask, documents, places)
        else:
            mask = self._local_mask(mask, x.shape[0])
            if documents is not None:
                mask = _same_document(documents, mask)
            mixed = self._attend(query, key, value, mask, inner)
        return self.out.apply_local(mixed.transpose(-3, -2).flatten(-2), inner, target)

    def _places(self, query: Tensor, inner: Activation) -> Tensor | None:
        """Place in the sequence of each token here, where they are not simply 0, 1, 2, ..."""
        sequence = self.parallel.sequence
        if sequence is None:
            return None
        part, ways = self.context.index(inner.tokens), self.context.size(inner.tokens)
        return sequence.positions(query.shape[-2], part, ways, query.device)

    def _local_documents(self, documents: Tensor, inner: Activation) -> Tensor:
        """The documents of the samples that this rank computes."""
        user = self.parallel.regions.user
        source, target = Layout((user.batch, user.tokens)), Layout((inner.batch, inner.tokens))
        return run(Route.of(moves(source, target), self.context).forward, documents).wait()

    def _attend_over_ranks(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        documents: Tensor | None,
        places: Tensor | None,
    ) -> Tensor:
        sequence = self.parallel.sequence
        assert sequence is not None
        assert places is not None
        if mask is not None:
            raise ValueError(
                f"{self.title}: a mask over whole sequences, but parallel.sequence splits them over {sequence.ways} "
                f"ranks: pass documents [batch, tokens], the number of the document that each token belongs to (with "
                f"padding as a document of its own)"
            )
        if self.training and self.dropout.p:
            raise ValueError(
                f"{self.title}: dropout = {self.dropout.p} of attention weights is not there under parallel.sequence: "
                f"set it to 0, or put dropout behind the attention"
            )
        tokens = query.shape[-2] * sequence.ways
        if not self.causal and sequence.length is not None and sequence.length < tokens:
            # what pads the sequence is a document of its own; a causal query never looks that far
            real = documents if documents is not None else query.new_zeros((query.shape[0], len(places)), dtype=_IDS)
            documents = real.masked_fill(places >= sequence.length, _PADDING)
        groups = SequenceGroups(sequence.ring, sequence.ulysses)
        return attend(query, key, value, groups, causal=self.causal, documents=documents)

    def _heads(self, x: Tensor) -> Tensor:
        """[.., tokens, heads * head_dim] -> [.., heads, tokens, head_dim]"""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)

    def _local_mask(self, mask: Tensor | None, batch: int) -> Tensor | None:
        """The mask [batch, heads, tokens, tokens] of the samples and heads this rank computes.

        Its gradient, where it has one, is a sum over what it is broadcast to.
        """
        if mask is None or not self.is_split:
            return mask
        user, inner = self.parallel.regions.user, self.parallel.regions.inner
        dims = mask.dim()
        by_sample = dims > 3 and mask.shape[0] == batch
        by_head = dims > 2 and mask.shape[-3] > 1
        there: list[tuple[str, ...]] = [()] * dims
        here: list[tuple[str, ...]] = [()] * dims
        summed_there, summed_here = user.batch, inner.batch
        if by_sample:
            there[0], here[0], summed_there, summed_here = user.batch, inner.batch, (), ()
        if by_head:
            here[-3] = inner.features
        else:
            summed_here += inner.features
        source, target = Layout(tuple(there), (), summed_there), Layout(tuple(here), (), summed_here)
        return redistribute(mask, source, target, self.context)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, inner: Activation) -> Tensor:
        grouped = self.num_kv_heads != self.num_heads
        causal = self.causal and mask is None
        if mask is not None and self.causal:
            tokens = query.shape[-2]
            past = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril_()
            mask = mask & past if mask.dtype == torch.bool else mask.masked_fill(~past, float("-inf"))
        rate = self.dropout.p if self.training else 0.0
        if rate == 0.0:
            return F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, enable_gqa=grouped)
        # torch's attention draws its mask from the global generator: lend it one that is keyed like our own dropout
        generator = self.dropout.generator(torch.device("cpu"), inner)
        devices = [query.device] if query.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(generator.initial_seed())
            return F.scaled_dot_product_attention(query, key, value, mask, rate, is_causal=causal, enable_gqa=grouped)


def _same_document(documents: Tensor, mask: Tensor | None) -> Tensor:
    """[batch, 1, tokens, tokens], True where query and key are of one document, combined with another mask."""
    same = (documents[:, :, None] == documents[:, None, :])[:, None]
    if mask is None:
        return same
    return same & mask if mask.dtype == torch.bool else mask.masked_fill(~same, float("-inf"))
