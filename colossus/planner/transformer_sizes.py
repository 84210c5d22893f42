"""The sizes of a transformer by its options, for formulas. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from colossus.models.options import DecoderOptions, TransformerOptions


@dataclass(frozen=True)
class Sizes:
    """The sizes of a transformer, in elements of weights.

    Attributes:
        options: the model's options.
        linears: linears of a block with an MLP: "column" or "row", in features, out features by name; those of the MLP
            are the last two. The small product down to the latents of `LatentAttention` is none of them.
        dense: number of layers with an MLP; the others have experts.
        attention: weights of an attention.
        mlp: weights of an MLP.
        experts: weights of all experts of a layer, without the shared one.
        shared: weights of the expert of a layer that all tokens go through.
        head: weights of the output layer over the vocabulary, 0 without one.
        embedding: weights of the token embedding, 0 if it is tied to the head.
        next_token: weights of the product that leads to the block of multi-token prediction, 0 without that block.
    """

    options: TransformerOptions
    linears: tuple[tuple[str, int, Mapping[str, int]], ...]
    dense: int
    attention: int
    mlp: int
    experts: int
    shared: int
    head: int
    embedding: int
    next_token: int

    @classmethod
    def of(cls, options: Any) -> Sizes | None:
        """Return the sizes of a model by its options, None for a model that this does not know."""
        if not isinstance(options, TransformerOptions) or not getattr(options, "generates", True):
            return None
        o, experts, latent = options, getattr(options, "experts", None), getattr(options, "latent", None)
        wide, hidden = o.ffn_hidden_size, o.hidden_size
        kv, queries = o.num_kv_heads * o.head_dim, o.num_heads * o.head_dim
        linears: list[tuple[str, int, Mapping[str, int]]]
        if latent is None:
            linears = [("column", hidden, {"query": queries, "key": kv, "value": kv}), ("row", queries, {"": hidden})]
            down = 0
        else:
            values = o.num_heads * latent.value_dim
            linears = [
                ("column", latent.q_rank or hidden, {"": queries}),
                ("column", latent.kv_rank, {"": o.num_heads * latent.nope_dim + values}),
                ("row", values, {"": hidden}),
            ]
            down = hidden * ((latent.q_rank or 0) + latent.cached)
        attention = down + sum(inside * sum(outputs.values()) for _, inside, outputs in linears)
        up = {"gate": wide, "value": wide} if o.mlp == "swiglu" else {"": wide}
        mlp = hidden * (sum(up.values()) + wide)
        linears += [("column", hidden, up), ("row", wide, {"": hidden})]
        table = o.hidden_size * o.vocab_size if isinstance(o, DecoderOptions) else 0
        is_tied = isinstance(o, DecoderOptions) and o.tie_embeddings
        return cls(
            o, tuple(linears),
            dense=sum(experts is None or not experts.is_in(layer) for layer in range(o.num_layers)),
            attention=attention, mlp=mlp,
            experts=0 if experts is None else 3 * experts.num * o.hidden_size * (experts.ffn_size or 0),
            shared=0 if experts is None else 3 * o.hidden_size * (experts.shared or 0),
            head=table, embedding=0 if is_tied else table,
            next_token=2 * hidden**2 if getattr(o, "mtp_weight", 0.0) else 0,
        )  # fmt: skip

    @property
    def tokens(self) -> int:
        """Return the tokens of a sample."""
        o: Any = self.options
        return o.seq_len if isinstance(o, DecoderOptions) else o.num_tokens

    @property
    def active(self) -> float:
        """Return the weights of blocks that a token is multiplied by. Experts that may drop tokens count as none."""
        o, experts = self.options, getattr(self.options, "experts", None)
        chosen = 0.0 if experts is None or experts.capacity is not None else self.experts * experts.top_k / experts.num
        sparse = o.num_layers - self.dense
        return o.num_layers * self.attention + self.dense * self.mlp + sparse * (chosen + self.shared)

    @property
    def recomputed(self) -> float:
        """Return the part of `active` that full checkpointing computes again: all but each block's last product."""
        o, dense = self.options, self.dense
        last = o.hidden_size * o.ffn_hidden_size
        experts = self.active - o.num_layers * self.attention - dense * self.mlp
        return self.active - dense * last - experts / 3

    @property
    def stored(self) -> tuple[int, int]:
        """Return the weights of blocks and head with shared experts, and the weights of all other experts."""
        layers, sparse = self.options.num_layers, self.options.num_layers - self.dense
        blocks = layers * self.attention + self.dense * self.mlp + sparse * self.shared
        experts = sparse * self.experts
        if self.next_token:  # and a block like that of the last layer
            blocks += self.next_token + self.attention + (self.shared if self.experts else self.mlp)
            experts += self.experts
        return blocks + self.head, experts
