"""Decoder-only language models, GPT and Llama: only their options differ."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from colossus.error_place import located_error
from colossus.layers.dropout import Dropout
from colossus.layers.embedding import Embedding, PositionEmbedding
from colossus.layers.layer import call, is_ours
from colossus.layers.lm_head import LMHead, no_chunks
from colossus.layers.lora import LoRALinear
from colossus.layers.loss import cross_entropy
from colossus.layers.model_parallel import to_residual
from colossus.layers.pipeline_block import PipelineBlock
from colossus.layers.token_values import ChunkedLogits, Logits
from colossus.models.adapters import adapt
from colossus.models.llama_options import LlamaOptions
from colossus.models.multi_token import (
    NEXT_IDS,
    NEXT_LABELS,
    NEXT_WEIGHTS,
    TOKEN_WEIGHTS,
    Further,
    NextToken,
    added_loss,
    with_next_tokens,
)
from colossus.models.objectives import Loss, loss_of_objective
from colossus.models.options import DecoderOptions, GPTOptions
from colossus.models.reference import chain_of_both, make_reference
from colossus.models.transformer import INIT, Transformer
from colossus.registry import MODELS
from colossus.sequence_parallel.kernels import soft_capped
from colossus.sharded_tensor.regions import to_whole

#: the value between two blocks: the activation, with all entries of the input but its ids where it has others
Hidden = Tensor | tuple[Tensor, dict[str, Tensor]]


class Decoder(Transformer[DecoderOptions]):
    """Decoder-only language model. A subclass names its options.

    Shape:
        ids [batch, tokens] in the whole layout, or dict(ids=..., documents=..., positions=...) with the number of the
        document of each token, [batch, tokens]: a token attends only to its own document; and with its position in it,
        [batch, tokens], which only learned positions need. Logits [batch, tokens, vocab_size], under
        tensor parallelism sharded by its mode (``colossus.layers.to_whole`` makes them whole).
    """

    options_class: ClassVar[type[DecoderOptions]]
    #: a frozen model beside one that trains
    is_reference = False
    #: a reference that has the weights of its run
    has_weights = False
    #: the path where they were found; None for initial values
    weights_path: str | None = None
    reference: Decoder | None

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
        self.key_value_cache = "linear" not in o.attention_pattern
        self.blocks = self.make_blocks()
        self.norm = self.make_norm()
        tied = self.embedding if o.tie_embeddings else None
        self.head = LMHead(o.hidden_size, o.vocab_size, tied_to=tied, init=INIT)
        self.next_token: NextToken | None = None
        if o.mtp_weight:
            norms = self.make_norm(), self.make_norm(), self.make_norm()
            self.next_token = NextToken(o.hidden_size, self.make_block(o.num_layers - 1), norms, INIT)
        if o.lora is not None:
            adapt(self, o.lora)
        self.reference = None if o.reference is None else make_reference(self, o.reference)
        self._objective: Loss | None = None
        if o.objective is not None:
            self._objective, self.eval_metrics = loss_of_objective(o.objective)

    def pipeline_blocks(self) -> list[PipelineBlock | nn.Module]:
        own, wanted = self._own_blocks(), self.options.reference
        if wanted is None:
            return [*own]
        if wanted.adapters_off and not any(isinstance(module, LoRALinear) for module in self.modules()):
            raise located_error(
                "reference.adapters_off: the model has no colossus.layers.LoRALinear, so it would be compared with "
                "itself: set model.lora, or reference = dict()"
            )
        other = self._own_blocks() if self.reference is None else self.reference._own_blocks()
        return [*chain_of_both(own, other, self.parallel, is_shared=self.reference is None)]

    def _own_blocks(self) -> list[PipelineBlock]:
        return [
            PipelineBlock(self._embed, self.embedding, self.positions, self.dropout, name="embedding"),
            *self.block_calls(),
            PipelineBlock(self._logits, self.norm, self.head, *self._further_modules(), name="head"),
        ]

    def _further_modules(self) -> tuple[nn.Module, ...]:
        """Return the modules that predict the token after the next."""
        return () if self.next_token is None else (self.next_token, self.embedding)

    def training_batch(self, batch: Any) -> Any:
        """Return a data rank's batch of a step with what whole sequences say, before they are split."""
        return batch if self.next_token is None else with_next_tokens(batch, self.parallel)

    def example_batch(self) -> dict[str, Tensor]:
        ids = torch.zeros(1, self.options.seq_len, dtype=torch.long, device="meta")
        return {"inputs": ids, "labels": ids}

    def _embed(self, inputs: Tensor | dict[str, Tensor]) -> Hidden:
        more = {key: x for key, x in inputs.items() if key != "ids"} if isinstance(inputs, dict) else {}
        x = self._embedded(inputs["ids"] if isinstance(inputs, dict) else inputs)
        positions = more.pop("positions", None)  # rotary ones are relative, so only learned ones need them
        if self.positions is not None:
            x = call(self.positions, x, self.parallel, positions=positions)
        x = call(self.dropout, x, self.parallel)
        return (x, more) if more else x

    def _embedded(self, ids: Tensor) -> Tensor:
        x = to_residual(self.embedding(ids), self.parallel)
        scale = self.options.embedding_scale
        return x if scale is None else x * scale

    def _logits(self, hidden: Hidden) -> Logits | Further:
        """Return the logits of next tokens, and of those after them in training with `next_token`."""
        x, more = hidden if isinstance(hidden, tuple) else (hidden, {})
        if self.parallel.batch_info.only_last_token and not self.parallel.regions.residual.tokens:
            x = x[:, -1:]
        x = call(self.norm, x, self.parallel)
        if self.next_token is None or NEXT_IDS not in more:
            return self._headed(x)
        further = self.next_token(x, self._embedded(more[NEXT_IDS]), more.get("documents"))
        return Further(self._headed(x), self._headed(further))

    def _headed(self, x: Tensor) -> Logits:
        cap, chunk = self.options.logit_cap, self.options.loss_chunk
        if chunk is not None and self.parallel.batch_info.microbatch_size:  # the loss of a step or evaluation follows
            if not (isinstance(self.head, LMHead) and is_ours(self.head)):
                raise no_chunks(self.head)
            return ChunkedLogits(x, self.head, chunk, cap)
        logits: Tensor = self.head(x if is_ours(self.head) else to_whole(x))
        return logits if cap is None else soft_capped(logits, cap)

    def run_block(self, block: nn.Module, hidden: Hidden) -> Hidden:
        if not isinstance(hidden, tuple):
            return call(block, hidden, self.parallel)
        return call(block, hidden[0], self.parallel, documents=hidden[1].get("documents")), hidden[1]

    def train(self, mode: bool = True) -> Self:
        return super().train(mode and not self.is_reference)

    def loss(self, logits: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return (sum, count) over the tokens of a batch with ``labels``, and maybe ``token_weights``: [batch, tokens].

        With ``token_weights`` a token's loss is multiplied by its weight, and the count is the sum of the weights. An
        objective has its own loss (`colossus.models.tuning_options`).
        """
        if self._objective is not None:
            if self.options.counted == "pairs" and self.parallel.batch_info.sample_step > 1:
                raise ValueError(
                    "train.samples_interact takes samples of a microbatch from all of the batch, and so parts the two "
                    "texts of a pair: leave it out, or set schedule.microbatches=1"
                )
            return self._objective(logits, batch)
        o = self.options
        entropy = partial(cross_entropy, label_smoothing=o.label_smoothing, z_loss=o.z_loss)
        if not isinstance(logits, Further):
            return entropy(logits, batch["labels"], token_weights=batch.get(TOKEN_WEIGHTS))
        total, count = entropy(logits.next, batch["labels"], token_weights=batch.get(TOKEN_WEIGHTS))
        further, _ = entropy(logits.after_next, batch[NEXT_LABELS], token_weights=batch.get(NEXT_WEIGHTS))
        return added_loss(total, further, o.mtp_weight, batch), count


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
