"""Options of the language model over words. No torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from colossus.models.options import Count, GPTOptions


class WordsOptions(GPTOptions):
    """Options of the words model: ``model = dict(type="WordsLM", vocab_size=50_000, pairs=65_536, ...)``.

    The options of `GPTOptions` for blocks and positions apply to ``trunk="gpt"`` only.
    """

    generates: ClassVar[bool] = False

    #: the layers between the tables: torch's LSTM, or the blocks of a GPT
    trunk: Literal["lstm", "gpt"] = "lstm"
    hidden_size: Count = 256
    num_layers: Count = 1
    seq_len: Count = 32
    vocab_size: Count = 50_000
    #: rows of a second table, of hashed pairs of words, which the data has beside the words; 0: no such table
    pairs: Annotated[int, Field(ge=0)] = 0
    #: the number of classes in the sample of a step's softmax
    num_samples: Count = 2048
    tie_embeddings: bool = False
    #: whether the tables, also those of the sampled softmax, have sparse gradients
    sparse_embeddings: bool = True

    def check(self, parallel: Any) -> list[str]:
        """Return what is wrong with these options, also under the ``parallel`` section; one line per problem."""
        lstm = self.trunk == "lstm"
        problems = [*self._check_pipeline(parallel)] if lstm else super().check(parallel)
        if lstm and parallel.sequence.size > 1:
            problems.append(
                "model.trunk = 'lstm' goes through the words one after the other, but parallel.sequence.size = "
                f"{parallel.sequence.size} would split them: use trunk='gpt', or parallel.sequence=1"
            )
        if self.num_samples > self.vocab_size:
            problems.append(
                f"model.num_samples = {self.num_samples} different words of model.vocab_size = {self.vocab_size}: set "
                f"it to {self.vocab_size} or less"
            )
        for key, why in (
            ("tie_embeddings", "the words and the softmax need tables of their own"),
            ("label_smoothing", "a sampled softmax has no logits of all words"),
            ("z_loss", "a sampled softmax has no log-partition of all words"),
            ("mtp_weight", "a sampled softmax has no logits of further words"),
            ("loss_chunk", "a sampled softmax has few logits"),
            ("objective", "a sampled softmax has its own loss"),
        ):
            if getattr(self, key):
                problems.append(f"model.{key} = {getattr(self, key)!r}: {why}; leave it out")
        return list(dict.fromkeys(problems))

    @property
    def num_blocks(self) -> int:
        return (1 if self.trunk == "lstm" else self.num_layers) + 2
