"""Options of a transformer block, and their defaults. No torch."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from colossus.arithmetic import round_up


def default_norm_eps(norm: str) -> float:
    """Return the epsilon of a norm of `colossus.registry.NORMS`."""
    return 1e-6 if norm == "rmsnorm" else 1e-5


def default_ffn_size(mlp: str, hidden_size: int) -> int:
    """Return the features between the two matmuls of an MLP of `colossus.registry.MLPS`.

    It is four times ``hidden_size``. The three matrices of SwiGLU at 8/3 of it cost as much as two at four times
    (2002.05202); the result is rounded up to a multiple of 64. It depends only on the model: fitted to the tensor
    ranks, another plan would be another model.
    """
    return round_up(-(-8 * hidden_size // 3), 64) if mlp == "swiglu" else 4 * hidden_size


class ExpertsOptions(BaseModel):
    """Experts in place of an MLP, with the options of `colossus.layers.MoE`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    #: experts of a layer
    num: Annotated[int, Field(ge=1)]
    #: experts that a token goes through
    top_k: Annotated[int, Field(ge=1)] = 2
    #: features inside an expert; default ``ffn_hidden_size``
    ffn_size: Annotated[int, Field(ge=1)] | None = None
    #: features inside an expert that all tokens go through; default none
    shared: Annotated[int, Field(ge=1)] | None = None
    #: softmax over the experts, or sigmoid of each
    score: Literal["softmax", "sigmoid"] = "softmax"
    #: the weights of a token's experts add up to 1
    norm_topk: bool = True
    #: factor of these weights (2.5 in DeepSeek-V3)
    scale: Annotated[float, Field(gt=0)] = 1.0
    #: equal groups of experts with consecutive numbers; default none
    groups: Annotated[int, Field(ge=1)] | None = None
    #: groups that a token's experts come from; default all
    top_groups: Annotated[int, Field(ge=1)] | None = None
    #: every so many layers one has experts, the last of them; the others have an MLP
    every: Annotated[int, Field(ge=1)] = 1
    #: the first layers, which have an MLP
    first_dense: Annotated[int, Field(ge=0)] = 0
    #: coefficient of the load-balancing loss of Switch (2101.03961)
    aux_loss: Annotated[float, Field(ge=0)] = 0.0
    #: coefficient of the router's z-loss (2202.08906)
    z_loss: Annotated[float, Field(ge=0)] = 0.0
    #: update in a step of the bias that balances the experts' tokens (2408.15664), 0 for a bias that stays; default no
    #: bias
    bias_update: Annotated[float, Field(ge=0)] | None = None
    #: the most tokens of an expert, as a multiple of the mean in a microbatch; default all
    capacity: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _has_as_many(self) -> ExpertsOptions:
        if self.top_k > self.num:
            raise ValueError(f"top_k = {self.top_k} experts of a token, but num = {self.num} of a layer")
        if problem := group_problem(self.num, self.top_k, self.groups, self.top_groups, self.score):
            raise ValueError(problem)
        return self

    def is_in(self, layer: int) -> bool:
        """Return whether a layer, from 0, has experts."""
        return layer >= self.first_dense and (layer + 1) % self.every == 0

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `colossus.layers.MoE`."""
        router = self.model_dump(include={"score", "norm_topk", "scale", "groups", "top_groups", "bias_update"})
        same = self.model_dump(include={"top_k", "ffn_size", "shared", "aux_loss", "z_loss", "capacity"})
        return {"num_experts": self.num, "router": router, **same}


def group_problem(num: int, top_k: int, groups: int | None, top_groups: int | None, score: str) -> str | None:
    """Return the reason why ``top_k`` experts of a token cannot come from ``top_groups`` of ``groups``, or None."""
    if groups is None:
        return None if top_groups is None else f"top_groups = {top_groups} without groups"
    if num % groups:
        return f"groups = {groups} does not divide the {num} experts"
    size, most = num // groups, top_groups or groups
    if score == "sigmoid" and size < 2:
        return f"groups = {groups} of {num} experts: a group is chosen by its two best experts, so it needs two"
    if most > groups or top_k > most * size:
        return f"top_groups = {most} of {groups} groups with {size} experts each: they lack experts for top_k = {top_k}"
    return None


class LatentOptions(BaseModel):
    """Latent attention in place of attention, with the sizes of `colossus.layers.LatentAttention`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    #: features of the latent from which the keys and values of a token are made
    kv_rank: Annotated[int, Field(ge=1)]
    #: features between the two products of the queries; default: one product, as in DeepSeek-V2-Lite
    q_rank: Annotated[int, Field(ge=1)] | None = None
    #: features of a query and a key without positions
    nope_dim: Annotated[int, Field(ge=1)] = 128
    #: features of a query, and of the key that all heads share, with rotary positions
    rope_dim: Annotated[int, Field(ge=2, multiple_of=2)] = 64
    #: features of a value
    value_dim: Annotated[int, Field(ge=1)] = 128

    @property
    def head_dim(self) -> int:
        """Features of a query and of a key."""
        return self.nope_dim + self.rope_dim

    @property
    def cached(self) -> int:
        """Numbers that a cache of generation holds for a token."""
        return self.kv_rank + self.rope_dim


class RotaryScaling(BaseModel):
    """The scaling of rotary frequencies in Llama 3.1 (2407.21783), with the keys of Hugging Face's ``rope_scaling``.

    Frequencies with fewer than ``low_freq_factor`` turns over the original length are divided by ``factor``, those with
    more than ``high_freq_factor`` turns do not change, and between them the change is gradual. ``rope_type="linear"``
    (2306.15595) divides all frequencies by ``factor``, and has no other keys.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    factor: Annotated[float, Field(ge=1)]
    low_freq_factor: Annotated[float, Field(gt=0)] = 1.0
    high_freq_factor: Annotated[float, Field(gt=0)] = 4.0
    original_max_position_embeddings: Annotated[int, Field(ge=1)] = 8192
    rope_type: Literal["llama3", "linear"] = "llama3"

    @model_validator(mode="after")
    def _in_order(self) -> RotaryScaling:
        if self.rope_type == "linear":
            fields = type(self).model_fields
            others = [key for key in fields if key not in ("factor", "rope_type")]
            if unused := [key for key in others if getattr(self, key) != fields[key].default]:
                raise ValueError(f"{', '.join(unused)}: rope_type = 'linear' takes only a factor")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor = {self.low_freq_factor} is not below high_freq_factor = {self.high_freq_factor}"
            )
        return self

    def scale(self, frequency: float) -> float:
        """Return the scaled frequency of a frequency, in radians per token."""
        if self.rope_type == "linear":
            return frequency / self.factor
        turns = self.original_max_position_embeddings * frequency / (2 * math.pi)
        unscaled = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        unscaled = min(1.0, max(0.0, unscaled))
        return frequency * (unscaled + (1 - unscaled) / self.factor)
