"""A language model over very many words, after that of Parallax (1808.02621, after 1602.02410): large tables around a
small trunk.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from colossus.construct.init import Normal
from colossus.error_place import located_error
from colossus.layers.dropout import Dropout
from colossus.layers.embedding import Embedding, PositionEmbedding
from colossus.layers.loss.sampled_softmax import SampledSoftmax
from colossus.layers.pipeline_block import PipelineBlock
from colossus.layers.sharded import to_whole
from colossus.layout.activation import Activation
from colossus.models.transformer import INIT, Transformer
from colossus.models.words_options import WordsOptions
from colossus.registry import MODELS

#: of tables that are looked up, whose rows are learned seldom
_TABLE_INIT = Normal(0.05)


@MODELS.register("WordsLM")
class WordsLM(Transformer[WordsOptions]):
    """Words, and with ``pairs`` hashed pairs of them, to the next word; options as in `WordsOptions`.

    Shape:
        ids [batch, tokens] in the whole layout, or with ``pairs`` dict(ids=.., pairs=..), both of that shape.
        Output [batch, tokens, hidden_size]: what `SampledSoftmax` turns into a loss, in evaluation that of the softmax
        over all words.
    """

    def __init__(self, **options: Any) -> None:
        o = WordsOptions(**options)
        super().__init__(o)
        sparse = o.sparse_embeddings
        self.embedding = Embedding(o.vocab_size, o.hidden_size, init=_TABLE_INIT, sparse=sparse)
        self.pairs = Embedding(o.pairs, o.hidden_size, init=_TABLE_INIT, sparse=sparse) if o.pairs else None
        is_gpt = o.trunk == "gpt"
        self.positions = PositionEmbedding(o.seq_len, o.hidden_size) if is_gpt and not o.is_rotary else None
        self.dropout = Dropout(o.dropout)
        rotary = dict(rotary=o.is_rotary, rotary_base=o.rotary_base, rotary_scaling=o.rotary_scaling)
        self.blocks = self.make_blocks(causal=True, **rotary) if is_gpt else nn.ModuleList()
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
                f"{'no' if pairs is None else 'a key'} 'pairs': give data.pairs the same number"
            )
        outer = self.parallel.regions.residual if self.lstm is None else self.parallel.regions.whole
        x = _rows(self.embedding, ids, outer)
        if self.pairs is not None and pairs is not None:
            x = x + _rows(self.pairs, pairs, outer)
        return self.dropout(x if self.positions is None else self.positions(x))

    def _recur(self, x: Tensor) -> Tensor:
        assert self.lstm is not None
        out: Tensor = self.lstm(to_whole(x))[0]
        return x + out

    def run_block(self, block: nn.Module, hidden: Tensor) -> Tensor:
        return self.between_blocks(block, hidden)

    def _normalized(self, hidden: Tensor) -> Tensor:
        return self.between_blocks(self.norm, hidden)

    def loss(self, hidden: Tensor, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """(sum, count) over the words of a batch with ``labels`` [batch, tokens]."""
        loss: tuple[Tensor, Tensor] = self.head(hidden, batch["labels"])
        return loss


def _rows(table: nn.Module, ids: Tensor, target: Activation) -> Tensor:
    """The rows of ``ids``: of an `Embedding` as ``target``, of a table in its place whole."""
    rows: Tensor = table.call_for(ids, target) if isinstance(table, Embedding) else table(ids)
    return rows
