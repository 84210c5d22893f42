"""Options of tuning: the loss in place of next tokens' cross-entropy, and the frozen model beside. No torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from colossus.config.errors import explain
from colossus.config.section import FROM_LIST

Weight = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class DistillationOptions(_Options):
    """Follow the reference's next tokens (`colossus.layers.distillation_loss`)."""

    type: Literal["distillation"]
    #: the divergence of the model from the reference, in place of the other way round
    reverse: bool = False
    #: divisor of the logits of both
    temperature: Positive = 1.0
    #: words of the reference that count at each token, its likeliest ones; default all
    top_k: Annotated[int, Field(ge=1)] | None = None
    #: weight of the labels' cross-entropy, the rest is the divergence's
    label_weight: Weight = 0.0

    @model_validator(mode="after")
    def _is_finite(self) -> DistillationOptions:
        if self.reverse and self.top_k is not None:
            raise ValueError("top_k leaves the reference no chance for other words, to which the reverse is infinite")
        return self


class DPOOptions(_Options):
    """Prefer the first text of each pair of samples (`colossus.layers.dpo_loss`)."""

    type: Literal["dpo"]
    #: scale of margins
    beta: Positive = 0.1
    #: chance that a pair is the wrong way round
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    #: log-sigmoid (DPO) or squared distance of margins (IPO)
    kind: Literal["sigmoid", "ipo"] = "sigmoid"


class GRPOOptions(_Options):
    """Raise the chance of texts by their ``advantages``, which the data has (`colossus.layers.policy_loss`)."""

    type: Literal["grpo"]
    #: bounds of the ratio to the policy that wrote the texts, 1 - clip and 1 + clip
    clip: Weight = 0.2
    #: in place of ``clip`` above 1
    clip_high: Annotated[float, Field(ge=0)] | None = None
    #: weight of the divergence from the reference
    kl_weight: Annotated[float, Field(ge=0)] = 0.0


Objective = Annotated[DistillationOptions | DPOOptions | GRPOOptions, Field(discriminator="type")]


#: linears of a block that adapters are put on; those of others (``gate`` in a plain MLP) a model has not
Target = Literal["query", "key", "value", "out", "gate", "up", "down"]
TARGETS: tuple[Target, ...] = get_args(Target)


class LoRAOptions(_Options):
    """Adapters on the linears of a decoder's blocks, which alone are trained (`colossus.layers.LoRALinear`)."""

    #: inner size of an adapter
    rank: Annotated[int, Field(ge=1)] = 8
    #: the adapters' product is multiplied by alpha / rank; default ``rank``
    alpha: Positive = Field(default_factory=lambda values: float(values["rank"]))
    #: linears that are adapted: of query, key, value, out, gate, up, down; default all that the blocks have
    targets: Annotated[tuple[Target, ...], FROM_LIST, Field(min_length=1)] | None = None
    #: a folder of peft whose adapters a new run begins with; of the same rank, alpha and targets
    path: Annotated[str, Field(min_length=1)] | None = None

    @property
    def scale(self) -> float:
        """The factor of the adapters' product."""
        return self.alpha / self.rank


class ReferenceOptions(_Options):
    """A frozen model that runs beside the trained one, under the same plan, in training and evaluation."""

    #: a checkpoint, or a model folder of Hugging Face; default ``path``, else the weights with which the model begins
    weights: Annotated[str, Field(min_length=1)] | None = None
    #: a model folder of Hugging Face with another model of the same vocabulary
    path: Annotated[str, Field(min_length=1)] | None = None
    #: options that differ from the model's: dict(num_layers=12)
    model: dict[str, Any] | None = None
    #: the model itself without its adapters (`colossus.layers.LoRALinear`), which needs no memory
    adapters_off: bool = False

    @model_validator(mode="before")
    @classmethod
    def _under_one_plan(cls, value: Any) -> Any:
        if isinstance(value, dict) and (key := next((key for key in ("parallel", "schedule") if key in value), None)):
            raise ValueError(f"{key}: the reference runs under the plan of the model, on the same ranks: leave it out")
        return value

    @model_validator(mode="after")
    def _is_one_model(self) -> ReferenceOptions:
        others = [key for key in ("weights", "path", "model") if getattr(self, key) is not None]
        if self.adapters_off and others:
            raise ValueError(
                f"adapters_off: the reference is the model itself, which has {' and '.join(others)} already"
            )
        if self.path is not None and self.model is not None:
            raise ValueError("path names a folder with a model of its own: leave model out")
        return self


def options_of_reference(options: Any) -> dict[str, Any]:
    """Return the options of a decoder's reference, unless that is a folder with a model of its own."""
    own = {name: getattr(options, name) for name in options.model_fields_set}
    none = {"objective": None, "reference": None, "lora": None, "sparse_embeddings": False}
    return {**own, **(options.reference.model or {}), **none}


def tuning_problem(options: Any) -> str | None:
    """Return why a decoder's options do not go with its objective or reference, or None."""
    objective, reference = options.objective, options.reference
    if objective is None and reference is None:
        return None
    ignored = next((key for key in ("mtp_weight", "label_smoothing", "z_loss") if getattr(options, key)), None)
    if ignored is not None:
        return f"{ignored} is of the loss of next tokens: leave it out with an objective or a reference"
    if objective is None:
        return "reference: no objective takes it; set objective = dict(type='distillation' or 'dpo' or 'grpo')"
    if objective.type == "distillation" and reference is None:
        return "objective: distillation needs a reference = dict(path='..'), or dict(weights='..', model=dict(..))"
    if reference is not None and getattr(options, "experts", None) is not None:
        return "reference: a model with experts runs beside no other, since its routers count the tokens of a step"
    if reference is not None and reference.adapters_off and (options.dropout or options.attention_dropout):
        return "reference.adapters_off: dropout would also be in the reference, which is the model itself: set it to 0"
    if reference is not None and objective.type == "grpo" and not objective.kl_weight:
        return "reference: objective grpo compares with none while its kl_weight is 0: set it, or leave reference out"
    if reference is not None and reference.model is not None:
        try:
            type(options)(**options_of_reference(options))
        except ValidationError as error:
            problems = explain(error, type(options), "reference.model")
            return "; ".join(f"{key}: {problem}" for key, problem in problems.items())
    return None
