"""Options of the models that come with colossus. No torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from colossus.layers.rotary_scaling import RotaryScaling
from colossus.models.transformer_options import Count, LinearSpec, Probability, TransformerOptions
from colossus.tensor_parallel.choice import Shardings


class DecoderOptions(TransformerOptions):
    """What every language model here can be told."""

    block_names: ClassVar[str] = "embedding, layers, head"

    #: number of tokens; padded inside of the model when it does not divide by the tensor ranks
    vocab_size: Count = 256
    #: base of the rotary positions: 10000 in Llama 2, 500000 in Llama 3
    rotary_base: Annotated[float, Field(gt=1)] = 10000.0
    #: of Llama 3.1 and later: dict(factor=8.0, original_max_position_embeddings=8192), say
    rotary_scaling: RotaryScaling | None = None
    tie_embeddings: bool = True
    label_smoothing: Probability = 0.0
    z_loss: Annotated[float, Field(ge=0)] = 0.0

    @property
    def num_blocks(self) -> int:
        return self.num_layers + 2

    def other_linears(self) -> list[LinearSpec]:
        return [LinearSpec("column", self.hidden_size, {"": self.vocab_size}, padded=True)]

    def other_parameters(self, shardings: Shardings | None) -> int:
        features = shardings.ways(shardings.regions.outer.features) if shardings else 1
        positions = 0 if self.is_rotary else self.seq_len * self.hidden_size // features
        (head,) = (self.stored(linear, shardings) for linear in self.other_linears())
        return self.norm_parameters + positions + head * (1 if self.tie_embeddings else 2)


class GPTOptions(DecoderOptions):
    """Options of the GPT: ``model = dict(type="GPT", num_layers=8, ...)``."""

    positions: Literal["learned", "rotary"] = "learned"

    @property
    def is_rotary(self) -> bool:
        return self.positions == "rotary"

    def check(self, parallel: Any) -> list[str]:
        """What is wrong with these sizes in any run, and under the ``parallel`` section; one line per problem."""
        return [*super().check(parallel), *self._check_rotary()]

    def _check_rotary(self) -> list[str]:
        if self.is_rotary:
            return []
        given = [key for key in ("rotary_base", "rotary_scaling") if key in self.model_fields_set]
        return [
            f"model.{key} = {getattr(self, key)!r} says how positions are rotated, but model.positions = "
            f"{self.positions!r}; set positions='rotary', or leave {key} out"
            for key in given
            if getattr(self, key) != type(self).model_fields[key].default
        ]


class LlamaOptions(DecoderOptions):
    """Options of Llama: ``model = dict(type="Llama", num_layers=32, num_kv_heads=8, rotary_base=500000.0, ...)``."""

    norm: Literal["rmsnorm"] = "rmsnorm"
    mlp: Literal["swiglu"] = "swiglu"
    #: of all norms
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    bias: bool = False
    tie_embeddings: bool = False

    @property
    def is_rotary(self) -> bool:
        return True
