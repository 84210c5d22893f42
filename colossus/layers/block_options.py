"""Options of a transformer block, and their defaults. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from colossus.arithmetic import round_up


def default_norm_eps(norm: str) -> float:
    """Return the epsilon of a norm of `colossus.registry.NORMS`."""
    return 1e-6 if norm.endswith("rmsnorm") else 1e-5


def default_ffn_size(mlp: str, hidden_size: int) -> int:
    """Return the features between the two matmuls of an MLP of `colossus.registry.MLPS`.

    It is four times ``hidden_size``. The three matrices of gated ones at 8/3 of it cost as much as two at four times
    (2002.05202); the result is rounded up to a multiple of 64. It depends only on the model: fitted to the tensor
    ranks, another plan would be another model.
    """
    return round_up(-(-8 * hidden_size // 3), 64) if mlp in ("swiglu", "geglu_tanh") else 4 * hidden_size


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
    #: biases of the router's and of the experts' products (gpt-oss)
    bias: bool = False
    #: bound of gate and up in the clamped gate of gpt-oss, (up + 1) * gate * sigmoid(alpha * gate); default: SwiGLU
    limit: Annotated[float, Field(gt=0)] | None = None
    #: factor inside the sigmoid of that gate
    alpha: Annotated[float, Field(gt=0)] = 1.702
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
        same = {"top_k", "ffn_size", "shared", "bias", "limit", "alpha", "aux_loss", "z_loss", "capacity"}
        return {"num_experts": self.num, "router": router, **self.model_dump(include=same)}


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


class LinearOptions(BaseModel):
    """Linear attention in place of attention, with the sizes of `colossus.layers.GatedDeltaNet`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    #: heads of values, each with a state
    num_heads: Annotated[int, Field(ge=1)]
    #: heads of queries and keys; default ``num_heads``
    num_key_heads: Annotated[int, Field(ge=1)] | None = None
    #: features of a query and a key
    key_dim: Annotated[int, Field(ge=1)] = 128
    #: features of a value
    value_dim: Annotated[int, Field(ge=1)] = 128
    #: tokens of the convolution before it
    kernel_size: Annotated[int, Field(ge=1)] = 4


#: the keys of each kind of scaling of rotary frequencies, beside its factor
_SCALING_KEYS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale",
        "mscale_all_dim",
    ),
}  # fmt: skip


class RotaryScaling(BaseModel):
    """The scaling of rotary frequencies for longer sequences, with the keys of Hugging Face's ``rope_scaling``.

    All kinds divide frequencies by ``factor``: ``linear`` (2306.15595) all of them. ``llama3`` (2407.21783) divides
    those with fewer than ``low_freq_factor`` turns over the original length and none with more than
    ``high_freq_factor``, ``yarn`` (2309.00071) those with fewer than ``beta_slow`` and none with more than
    ``beta_fast``; between them the change is gradual, in llama3 by the turns, in yarn by the number of the pair. Under
    yarn queries and keys are multiplied, too: by ``attention_factor``, which by default is 0.1 ln(factor) + 1.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    factor: Annotated[float, Field(ge=1)]
    low_freq_factor: Annotated[float, Field(gt=0)] = 1.0
    high_freq_factor: Annotated[float, Field(gt=0)] = 4.0
    beta_slow: Annotated[float, Field(gt=0)] = 1.0
    beta_fast: Annotated[float, Field(gt=0)] = 32.0
    #: yarn's first and last pair of those that change gradually are rounded to whole numbers
    truncate: bool = True
    attention_factor: Annotated[float, Field(gt=0)] | None = None
    #: weights of ln(factor) in numerator and denominator of the default attention factor (DeepSeek-V2)
    mscale: float | None = None
    mscale_all_dim: float | None = None
    original_max_position_embeddings: Annotated[int, Field(ge=1)] = 8192
    rope_type: Literal["llama3", "linear", "yarn"] = "llama3"

    @model_validator(mode="after")
    def _has_its_keys(self) -> RotaryScaling:
        own = ("factor", "rope_type", *_SCALING_KEYS[self.rope_type])
        others = {name: field for name, field in type(self).model_fields.items() if name not in own}
        if unused := [name for name, field in others.items() if getattr(self, name) != field.default]:
            raise ValueError(f"{', '.join(unused)}: rope_type = {self.rope_type!r} takes only {', '.join(own)}")
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if getattr(self, low) >= getattr(self, high):
                raise ValueError(f"{low} = {getattr(self, low)} is not below {high} = {getattr(self, high)}")
        return self

    @classmethod
    def of(cls, scaling: RotaryScaling | Mapping[str, Any] | None) -> RotaryScaling | None:
        """Return a scaling, made of its keys where it is a mapping."""
        return cls(**scaling) if isinstance(scaling, Mapping) else scaling

    @property
    def keys(self) -> dict[str, Any]:
        """The values of the keys that its kind has, without those that are None."""
        keys = {"rope_type", "factor", *_SCALING_KEYS[self.rope_type]}
        return self.model_dump(include=keys, exclude_none=True)

    def frequencies(self, base: float, dim: int) -> list[float]:
        """Return the scaled frequency of each of the dim / 2 pairs, in radians per token."""
        plain = [base ** (-i / dim) for i in range(0, dim, 2)]
        unscaled = [self._unscaled_share(base, dim, pair) for pair in range(dim // 2)]
        return [f * (share + (1 - share) / self.factor) for f, share in zip(plain, unscaled, strict=True)]

    def _unscaled_share(self, base: float, dim: int, pair: int) -> float:
        if self.rope_type == "linear":
            return 0.0
        length = self.original_max_position_embeddings / (2 * math.pi)
        if self.rope_type == "llama3":
            turns = length * base ** (-2 * pair / dim)
            share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        else:
            # the pairs with so many turns, by which the others are counted
            fast, slow = (
                dim * math.log(length / beta) / (2 * math.log(base)) for beta in (self.beta_fast, self.beta_slow)
            )
            if self.truncate:
                fast, slow = math.floor(fast), math.ceil(slow)
            fast, slow = max(fast, 0), min(slow, dim - 1)
            share = 1 - (pair - fast) / (slow - fast if slow != fast else 0.001)
        return min(1.0, max(0.0, share))

    @property
    def amplitude(self) -> float:
        """The factor of the rotated queries and keys."""
        if self.rope_type != "yarn" or self.attention_factor is not None:
            return self.attention_factor or 1.0

        if self.mscale and self.mscale_all_dim:
            return self._of_length(self.mscale) / self._of_length(self.mscale_all_dim)
        return self._of_length(1.0)

    @property
    def score_factor(self) -> float:
        """The factor of the scores of latent attention, whose queries and keys have parts that are not rotated."""
        return self._of_length(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _of_length(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0
