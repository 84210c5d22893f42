"""Options of the language model over words. No torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from colossus.models.options import Count, GPTOptions


class WordsOptions(GPTOptions):
    """Options of the words model: ``model = dict(type="WordsLM", vocab_size=50_000, pairs=65_536, ...)``.

    Those of `GPTOptions` that say how its blocks and positions are count for ``trunk="gpt"`` alone.
    """

    generates: ClassVar[bool] = False

    #: what is between the tables: torch's LSTM, or the blocks of a GPT
    trunk: Literal["lstm", "gpt"] = "lstm"
    hidden_size: Count = 256
    num_layers: Count = 1
    seq_len: Count = 32
    vocab_size: Count = 50_000
    #: rows of a second table, of hashed pairs of words, which the data gives beside the words; 0: none
    pairs: Annotated[int, Field(ge=0)] = 0
    #: classes against which a word is learned in a step
    num_samples: Count = 2048
    tie_embeddings: bool = False
    #: whether gradients of the tables, those of the sampled softmax among them, are of rows
    sparse_embeddings: bool = True

    def check(self, parallel: Any) -> list[str]:
        """What is wrong with these sizes in any run, and under the ``parallel`` section; one line per problem."""
        lstm = self.trunk == "lstm"
        problems = [*self._check_pipeline(parallel)] if lstm else super().check(parallel)
        if lstm and parallel.sequence.size > 1:
            problems.append(
                "model.trunk = 'lstm' goes through the words one after the other, which parallel.sequence.size = "
                f"{parallel.sequence.size} would split: use trunk='gpt', or parallel.sequence=1"
            )
        if self.num_samples > self.vocab_size:
            problems.append(
                f"model.num_samples = {self.num_samples} different ones of model.vocab_size = {self.vocab_size} words: "
                f"give {self.vocab_size} or less"
            )
        for key, why in (
            ("tie_embeddings", "the tables of words and of the softmax are two"),
            ("label_smoothing", "a sample has no part for all words"),
            ("z_loss", "a sample has no log-partition of all words"),
        ):
            if getattr(self, key):
                problems.append(f"model.{key} = {getattr(self, key)!r}: {why}; leave it out")
        return list(dict.fromkeys(problems))

    @property
    def num_blocks(self) -> int:
        return (1 if self.trunk == "lstm" else self.num_layers) + 2
