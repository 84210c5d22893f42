"""Decoder-only language models, GPT and Llama: only their options differ."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from colossus.layers.dropout import Dropout
from colossus.layers.embedding import Embedding, PositionEmbedding
from colossus.layers.layer import call, is_ours
from colossus.layers.lm_head import LMHead
from colossus.layers.loss import cross_entropy
from colossus.layers.model_parallel import to_residual
from colossus.layers.pipeline_block import PipelineBlock
from colossus.models.llama_options import LlamaOptions
from colossus.models.options import DecoderOptions, GPTOptions
from colossus.models.transformer import INIT, Transformer
from colossus.registry import MODELS
from colossus.sequence_parallel.kernels import soft_capped
from colossus.sharded_tensor.regions import to_whole

#: the value between two blocks: the activation, with the documents of its tokens where the input has them
Hidden = Tensor | tuple[Tensor, Tensor]


class Decoder(Transformer[DecoderOptions]):
    """Decoder-only language model. A subclass names its options.

    Shape:
        ids [batch, tokens] in the whole layout, or dict(ids=..., documents=...) with the number of the document of each
        token, [batch, tokens]: a token attends only to its own document. Logits [batch, tokens, vocab_size], under
        tensor parallelism sharded by its mode (``colossus.layers.to_whole`` makes them whole).
    """

    options_class: ClassVar[type[DecoderOptions]]

    def __init__(self, **options: Any) -> None:
        o = self.options_class(**options)
        super().__init__(o)
        self.embedding = Embedding(
            o.vocab_size,
            o.hidden_size,
            init=INIT,
            sparse=o.sparse_embeddings,
            return_layout=self.parallel.regions.residual,
        )
        self.positions = None if o.is_rotary else PositionEmbedding(o.seq_len, o.hidden_size)
        self.dropout = Dropout(o.dropout)
        self.blocks = self.make_blocks()
        self.norm = self.make_norm()
        tied = self.embedding if o.tie_embeddings else None
        self.head = LMHead(o.hidden_size, o.vocab_size, tied_to=tied, init=INIT)

    def pipeline_blocks(self) -> list[PipelineBlock | nn.Module]:
        return [
            PipelineBlock(self._embed, self.embedding, self.positions, self.dropout, name="embedding"),
            *self.block_calls(),
            PipelineBlock(self._logits, self.norm, self.head, name="head"),
        ]

    def example_batch(self) -> dict[str, Tensor]:
        ids = torch.zeros(1, self.options.seq_len, dtype=torch.long, device="meta")
        return {"inputs": ids, "labels": ids}

    def _embed(self, inputs: Tensor | dict[str, Tensor]) -> Hidden:
        ids, documents = (inputs["ids"], inputs.get("documents")) if isinstance(inputs, dict) else (inputs, None)
        x = to_residual(self.embedding(ids), self.parallel)
        if self.options.embedding_scale is not None:
            x = x * self.options.embedding_scale
        if self.positions is not None:
            x = call(self.positions, x, self.parallel)
        x = call(self.dropout, x, self.parallel)
        return x if documents is None else (x, documents)

    def _logits(self, hidden: Hidden) -> Tensor:
        x = hidden[0] if isinstance(hidden, tuple) else hidden
        if self.parallel.batch_info.only_last_token and not self.parallel.regions.residual.tokens:
            x = x[:, -1:]
        x = call(self.norm, x, self.parallel)
        logits: Tensor = self.head(x if is_ours(self.head) else to_whole(x))
        cap = self.options.logit_cap
        return logits if cap is None else soft_capped(logits, cap)

    def run_block(self, block: nn.Module, hidden: Hidden) -> Hidden:
        if not isinstance(hidden, tuple):
            return call(block, hidden, self.parallel)
        return call(block, hidden[0], self.parallel, documents=hidden[1]), hidden[1]

    def loss(self, logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return (sum, count) over the tokens of a batch with ``labels`` [batch, tokens]."""
        o = self.options
        return cross_entropy(logits, batch["labels"], label_smoothing=o.label_smoothing, z_loss=o.z_loss)


@MODELS.register("GPT")
class GPT(Decoder):
    """Decoder-only language model, by default that of GPT-2. `GPTOptions` has its options, `Decoder` its shapes."""

    options_class = GPTOptions


@MODELS.register("Llama")
class Llama(Decoder):
    """Llama 2 (2307.09288) and 3 (2407.21783): rotary positions, RMSNorm, SwiGLU, grouped-query attention.

    `LlamaOptions` has its options, `Decoder` its shapes. Initial values are GPT-2's, since no others were published.
    """

    options_class = LlamaOptions
