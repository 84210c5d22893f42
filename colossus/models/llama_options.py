"""Sizes and choices of Llama and of models that differ from it in their MLPs or attention. No torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from colossus.arithmetic import not_a_multiple
from colossus.layers.block_options import ExpertsOptions, LatentOptions, LinearOptions
from colossus.models.options import DecoderOptions


class LlamaOptions(DecoderOptions):
    """Options of Llama: ``model = dict(type="Llama", num_layers=32, num_kv_heads=8, rotary_base=500000.0, ...)``."""

    norm: Literal["rmsnorm", "zero_centered_rmsnorm"] = "rmsnorm"
    mlp: Literal["swiglu", "geglu_tanh"] = "swiglu"
    #: epsilon of all norms
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    bias: bool = False
    tie_embeddings: bool = False
    #: experts in place of MLPs (Mixtral, Qwen3-MoE): dict(num=8, top_k=2)
    experts: ExpertsOptions | None = None
    #: latent attention (DeepSeek-V2, V3): dict(kv_rank=512, q_rank=1536)
    latent: LatentOptions | None = None
    #: linear attention in the layers of this kind (Qwen3-Next): dict(num_heads=32, num_key_heads=16) with
    #: attention_pattern = 3 * ["linear"] + ["global"]
    linear: LinearOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _heads_are_latent(cls, value: Any) -> Any:
        """Set the sizes of heads that follow from ``latent``; others are refused."""
        latent = value.get("latent") if isinstance(value, dict) else None
        if latent is None:
            return value
        sizes = latent if isinstance(latent, LatentOptions) else LatentOptions.model_validate(latent)
        follow = {
            "head_dim": sizes.head_dim,
            "num_kv_heads": value.get("num_heads", 4),
            "qk_norm": False,
            "rotary_fraction": 1.0,
        }
        for name, size in follow.items():
            if value.get(name) not in (None, size):
                raise ValueError(f"{name} = {value[name]} with latent attention, whose heads have {name} = {size}")
        return {**value, **follow}

    @field_validator("experts")
    @classmethod
    def _sized(cls, value: ExpertsOptions | None, info: ValidationInfo) -> ExpertsOptions | None:
        if value is None or value.ffn_size is not None:
            return value
        return value.model_copy(update={"ffn_size": info.data.get("ffn_hidden_size")})

    @property
    def is_rotary(self) -> bool:
        return True

    @property
    def has_mlps(self) -> bool:
        return self.experts is None or not all(map(self.experts.is_in, range(self.num_layers)))

    def block_options(self, layer: int) -> dict[str, Any]:
        options = super().block_options(layer)
        if self.experts is not None and self.experts.is_in(layer):
            options["experts"] = self.experts.arguments
        if self.linear is not None and self.kind_of(layer) == "linear":
            own = ("norm_place", "experts")
            return {name: options[name] for name in own if name in options} | {"linear": self.linear.model_dump()}
        if self.latent is not None:
            options["latent"] = self.latent.model_dump()
            for name in ("head_dim", "qk_norm", "rotary", "rotary_fraction"):  # which latent attention does not have
                del options[name]
        return options

    def check(self, parallel: Any) -> list[str]:
        problems, ranks = super().check(parallel), parallel.expert.size
        if self.experts is not None and self.experts.num % ranks:
            by = f"parallel.expert.size = {ranks}"
            problems.append(not_a_multiple("model.experts.num", self.experts.num, by, ranks))
        return problems
