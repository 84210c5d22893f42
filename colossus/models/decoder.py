"""The pre-norm transformer decoder that `GPT` and `Llama` are: only their options differ."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from colossus.construct.init import Constant, Normal
from colossus.context.parallel_context import current_context
from colossus.layers.block import TransformerBlock
from colossus.layers.children import computes_as_ours, is_listened_to, run_child, to_local
from colossus.layers.dropout import Dropout
from colossus.layers.embedding import Embedding, PositionEmbedding
from colossus.layers.head import LMHead
from colossus.layers.loss.cross_entropy import cross_entropy
from colossus.layers.model_parallel import model_parallel_of
from colossus.layers.pipeline_block import PipelineBlock, run_blocks
from colossus.layers.sharded import last_token, to_outer, to_user, wrap
from colossus.layers.token_dim import tokens_of
from colossus.layers.tokens import local
from colossus.layout.activation import Activation
from colossus.models.options import DecoderOptions
from colossus.registry import NORMS

#: the value between two blocks: the activation, with the documents of its tokens where the input has them
Hidden = Tensor | tuple[Tensor, Tensor]


class Decoder(nn.Module):
    """Decoder-only language model. A subclass names its options.

    Weights start normal with standard deviation 0.02, those that write to the residual stream with 0.02 / sqrt(2 L)
    (GPT-2).

    Shape:
        ids [batch, tokens] in the user layout, or dict(ids=..., documents=...) with the number of the document of each
        token, [batch, tokens]: a token looks at its own document only.
        Logits [batch, tokens, vocab_size], under tensor parallelism sharded as its mode does
        (``colossus.layers.to_user`` makes them whole).
    """

    options_class: ClassVar[type[DecoderOptions]]

    def __init__(self, **options: Any) -> None:
        super().__init__()
        o = self.options = self.options_class(**options)
        self.parallel = model_parallel_of(current_context())
        init = Normal(0.02)
        residual_init = Normal(0.02 / math.sqrt(2 * o.num_layers))
        self.embedding = Embedding(o.vocab_size, o.hidden_size, init=init)
        self.positions = None if o.is_rotary else PositionEmbedding(o.seq_len, o.hidden_size)
        self.dropout = Dropout(o.dropout)
        self.blocks = nn.ModuleList(
            TransformerBlock(
                o.hidden_size,
                o.num_heads,
                o.num_kv_heads,
                o.ffn_hidden_size,
                bias=o.bias,
                norm=o.norm,
                norm_eps=o.norm_eps,
                mlp=o.mlp,
                dropout=o.dropout,
                attention_dropout=o.attention_dropout,
                rotary=o.is_rotary,
                rotary_base=o.rotary_base,
                rotary_scaling=o.rotary_scaling,
                activation_checkpoint=o.activation_checkpoint,
                init=init,
                out_init=residual_init,
                bias_init=Constant(0.0),
            )
            for _ in range(o.num_layers)
        )
        self.norm: nn.Module = NORMS.get(o.norm).make(o.hidden_size, o.bias, o.norm_eps)
        tied = self.embedding if o.tie_embeddings else None
        self.head = LMHead(o.hidden_size, o.vocab_size, tied_to=tied, init=init)

    def forward(self, ids: Tensor | dict[str, Tensor]) -> Tensor:
        logits: Tensor = run_blocks(self.pipeline_blocks(), ids)
        return logits

    def pipeline_blocks(self) -> list[PipelineBlock | nn.Module]:
        """The model as a chain: embedding, transformer blocks, head."""
        return [
            PipelineBlock(self._embed, self.embedding, self.positions, self.dropout, name="embedding"),
            *(PipelineBlock(partial(self._run_block, block), block) for block in self.blocks),
            PipelineBlock(self._logits, self.norm, self.head, name="head"),
        ]

    def _embed(self, inputs: Tensor | dict[str, Tensor]) -> Hidden:
        ids, documents = (inputs["ids"], inputs.get("documents")) if isinstance(inputs, dict) else (inputs, None)
        outer = self.parallel.regions.outer
        x = self._look_up(ids, outer)
        if self.positions is not None:
            x = run_child(self, "positions", x, outer, outer)
        x = run_child(self, "dropout", x, outer, outer)
        x = wrap(x, outer, outer, self.parallel, token_dim=tokens_of(ids))
        return x if documents is None else (x, documents)

    def _look_up(self, ids: Tensor, target: Activation) -> Tensor:
        embedding: nn.Module = self.embedding
        if not isinstance(embedding, Embedding) or not computes_as_ours(embedding):
            return to_local(embedding(ids), target, self.parallel)
        if is_listened_to(embedding):
            return to_local(embedding.call_for(ids, target), target, self.parallel)
        return embedding.apply_local(local(ids), target)

    def _logits(self, hidden: Hidden) -> Tensor:
        x = hidden[0] if isinstance(hidden, tuple) else hidden
        if self.parallel.batch_info.only_last_token and not self.parallel.regions.outer.tokens:
            x = last_token(x)
        x = self._between_blocks(self.norm, x)
        logits: Tensor = self.head(x if computes_as_ours(self.head) else to_user(x))
        return logits

    def _run_block(self, block: nn.Module, hidden: Hidden) -> Hidden:
        if not isinstance(hidden, tuple):
            return self._between_blocks(block, hidden)
        return self._between_blocks(block, hidden[0], documents=hidden[1]), hidden[1]

    def _between_blocks(self, module: nn.Module, x: Tensor, **more: Tensor) -> Tensor:
        """A module that a user put in the place of one of ours gets, and gives, the user layout."""
        if computes_as_ours(module):
            return module(x, **more)
        return to_outer(module(to_user(x), **more), self.parallel)

    def loss(self, logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(sum, count) over the tokens of a batch with ``labels`` [batch, tokens]."""
        o = self.options
        return cross_entropy(logits, batch["labels"], label_smoothing=o.label_smoothing, z_loss=o.z_loss)
