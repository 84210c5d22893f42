"""The options of a language model's attention, by the kinds of its layers. No torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from colossus.layers.block_options import RotaryScaling
from colossus.sequence_parallel.mask import Mask


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


Count = Annotated[int, Field(ge=1)]
Kinds = Annotated[tuple[Literal["local", "global", "linear"], ...], BeforeValidator(_as_tuple), Field(min_length=1)]


class AttentionOptions(BaseModel):
    """The options of attention: tokens that one attends to in each layer, scores, and rotary positions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    #: RMSNorm of every query and key, with a weight [head_dim] each, before their rotation (Qwen3)
    qk_norm: bool = False
    #: factor of the scores of attention; default head_dim ** -0.5
    attention_scale: Annotated[float, Field(gt=0)] | None = None
    #: bound of the scores, soft_cap * tanh(score / soft_cap) (2408.00118, Gemma 2); default none
    soft_cap: Annotated[float, Field(gt=0)] | None = None
    #: a learned score of each head beside those of the keys, whose value is zero (gpt-oss)
    sinks: bool = False
    #: in local layers, tokens that one attends to, itself and those before it (Mistral's sliding window, 2310.06825)
    window: Count | None = None
    #: in local layers, tokens of a chunk, outside of which none is attended to (Llama 4)
    chunk: Count | None = None
    #: kinds of the layers in turn: local ones with window or chunk, global ones, which attend to all tokens before, and
    #: linear ones (``linear`` of Llama); 5 * ["local"] + ["global"] in Gemma 3 (2503.19786). By default all are local
    #: where there is a window or chunk
    attention_pattern: Kinds = Field(
        default_factory=lambda values: ("local",) if values["window"] or values["chunk"] else ("global",)
    )
    #: base of the rotary positions: 10000 in Llama 2, 500000 in Llama 3
    rotary_base: Annotated[float, Field(gt=1)] = 10000.0
    #: the same in local layers, which then have no scaling (Gemma 3); default: as in global layers
    rotary_base_local: Annotated[float, Field(gt=1)] | None = None
    #: part of a head's features that is rotated, the first ones (GPT-NeoX)
    rotary_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    #: scaling in Llama 3.1 and later: dict(factor=8.0, original_max_position_embeddings=8192), say
    rotary_scaling: RotaryScaling | None = None

    @model_validator(mode="after")
    def _local_layers_differ(self) -> AttentionOptions:
        if ("local" in self.attention_pattern) != bool(self.window or self.chunk):
            raise ValueError(
                f"attention_pattern = {self.attention_pattern} with window = {self.window} and chunk = {self.chunk}: "
                f"local layers need one of both, and nothing else uses them"
            )
        linear = getattr(self, "linear", None)
        if ("linear" in self.attention_pattern) != (linear is not None):
            raise ValueError(
                f"attention_pattern = {self.attention_pattern} with linear = {'None' if linear is None else '{..}'}: "
                f"linear layers need the sizes of linear attention, which Llama has as linear=dict(num_heads=..), and "
                f"nothing else uses them"
            )
        return self

    def is_local(self, layer: int) -> bool:
        """Return whether a layer, from 0, attends to some of the tokens before it only."""
        return self.kind_of(layer) == "local"

    def kind_of(self, layer: int) -> str:
        """Return the kind of a layer, from 0."""
        return self.attention_pattern[layer % len(self.attention_pattern)]

    def mask(self, layer: int) -> Mask:
        mask = Mask.causal()
        if self.is_local(layer):
            mask &= Mask.window(self.window - 1) if self.window else mask
            mask &= Mask.chunk(self.chunk) if self.chunk else mask
        return mask

    def attention_arguments(self, layer: int) -> dict[str, Any]:
        """Return arguments of the `Attention` of a layer, from 0."""
        own_base = self.rotary_base_local if self.is_local(layer) else None
        return {
            "rotary_base": own_base or self.rotary_base,
            "rotary_fraction": self.rotary_fraction,
            "rotary_scaling": self.rotary_scaling if own_base is None else None,
            "scale": self.attention_scale,
            "soft_cap": self.soft_cap,
            "sinks": self.sinks,
        }
