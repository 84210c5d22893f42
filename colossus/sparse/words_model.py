"""A language model over very many words, large tables around a small trunk, as in Parallax (1808.02621, 1602.02410)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from colossus.construct.initial_values import Normal
from colossus.error_place import located_error
from colossus.layers.dropout import Dropout
from colossus.layers.embedding import Embedding, PositionEmbedding
from colossus.layers.layer import call
from colossus.layers.pipeline_block import PipelineBlock
from colossus.models.transformer import INIT, Transformer
from colossus.registry import MODELS
from colossus.sharded_tensor.regions import moved, to_whole
from colossus.sparse.sampled_softmax import SampledSoftmax
from colossus.sparse.words_options import WordsOptions

#: the initial values of tables that are looked up, whose rows are seldom updated
_TABLE_INIT = Normal(0.05)


@MODELS.register("WordsLM")
class WordsLM(Transformer[WordsOptions]):
    """A model that predicts the next word from words and, with ``pairs``, hashed pairs of words (see `WordsOptions`).

    Shape:
        ids [batch, tokens] in the whole layout, or with ``pairs`` dict(ids=.., pairs=..), both of that shape ->
        [batch, tokens, hidden_size], of which `loss` makes a sampled softmax, or in evaluation one over all words.
    """

    def __init__(self, **options: Any) -> None:
        o = WordsOptions(**options)
        super().__init__(o)
        sparse = o.sparse_embeddings
        is_gpt = o.trunk == "gpt"
        outer = self.parallel.regions.residual if is_gpt else None
        table: dict[str, Any] = dict(init=_TABLE_INIT, sparse=sparse, return_layout=outer)
        self.embedding = Embedding(o.vocab_size, o.hidden_size, **table)
        self.pairs = Embedding(o.pairs, o.hidden_size, **table) if o.pairs else None
        self.positions = PositionEmbedding(o.seq_len, o.hidden_size) if is_gpt and not o.is_rotary else None
        self.dropout = Dropout(o.dropout)
        self.blocks = self.make_blocks() if is_gpt else nn.ModuleList()
        self.lstm = None if is_gpt else nn.LSTM(o.hidden_size, o.hidden_size, o.num_layers, batch_first=True)
        self.norm = self.make_norm()
        self.head = SampledSoftmax(o.hidden_size, o.vocab_size, o.num_samples, sparse=sparse, init=INIT)

    def pipeline_blocks(self) -> list[PipelineBlock | nn.Module]:
        trunk = self.block_calls() if self.lstm is None else [PipelineBlock(self._recur, self.lstm, name="lstm")]
        return [
            PipelineBlock(self._embed, self.embedding, self.pairs, self.positions, self.dropout, name="embedding"),
            *trunk,
            PipelineBlock(self._normalized, self.norm, self.head, name="head"),
        ]

    def _embed(self, inputs: Tensor | dict[str, Tensor]) -> Tensor:
        ids, pairs = (inputs["ids"], inputs.get("pairs")) if isinstance(inputs, dict) else (inputs, None)
        if (pairs is None) != (self.pairs is None):
            raise located_error(
                f"WordsLM: model.pairs = {self.options.pairs}, but the batch has "
                f"{'no' if pairs is None else 'a'} key 'pairs': set data.pairs to the same number"
            )
        outer = self.parallel.regions.residual if self.lstm is None else self.parallel.regions.whole
        x = moved(self.embedding(ids), outer, self.parallel)
        if self.pairs is not None and pairs is not None:
            x = x + moved(self.pairs(pairs), outer, self.parallel)
        return self.dropout(x if self.positions is None else self.positions(x))

    def _recur(self, x: Tensor) -> Tensor:
        assert self.lstm is not None
        out: Tensor = self.lstm(to_whole(x))[0]
        return x + out

    def run_block(self, block: nn.Module, hidden: Tensor) -> Tensor:
        x: Tensor = call(block, hidden, self.parallel)
        return x

    def _normalized(self, hidden: Tensor) -> Tensor:
        x: Tensor = call(self.norm, hidden, self.parallel)
        return x

    def loss(self, hidden: Tensor, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the loss's sum and count over the words of a batch with ``labels`` [batch, tokens]."""
        loss: tuple[Tensor, Tensor] = self.head(hidden, batch["labels"])
        return loss
