"""Options of optimizers of whole parameters, beside ``lr``. No torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, ValidationInfo

from colossus.config.section import FROM_LIST, NotNegative, Positive, Section

Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Beta, Beta], FROM_LIST]


def _looks_ahead(value: bool, info: ValidationInfo) -> bool:
    if value and (not info.data.get("momentum") or info.data.get("dampening")):
        raise ValueError("needs a momentum above 0 and no dampening")
    return value


#: Nesterov's form of a momentum, which stands before it among the options
Nesterov = Annotated[bool, AfterValidator(_looks_ahead)]


class OptimizerOptions(Section):
    """Base of the options of optimizers."""

    #: options of parameter groups alone
    of_groups: ClassVar[tuple[str, ...]] = ()


class AdafactorOptions(OptimizerOptions):
    beta2_decay: Annotated[float, Field(le=0)] = -0.8
    eps: Annotated[tuple[NotNegative | None, NotNegative], FROM_LIST] = (None, 1e-3)
    d: Annotated[float, Field(ge=1)] = 1.0
    weight_decay: NotNegative = 0.0


class LAMBOptions(OptimizerOptions):
    of_groups = ("adapt",)

    betas: Betas = (0.9, 0.999)
    eps: NotNegative = 1e-6
    weight_decay: NotNegative = 0.01
    bias_correction: bool = True


class LARSOptions(OptimizerOptions):
    of_groups = ("adapt",)

    momentum: Beta = 0.9
    weight_decay: NotNegative = 1e-4
    trust_coefficient: Positive = 1e-3
    eps: NotNegative = 0.0
    nesterov: Nesterov = False


class MuonOptions(OptimizerOptions):
    of_groups = ("muon",)

    weight_decay: NotNegative = 0.1
    momentum: Beta = 0.95
    nesterov: Nesterov = True
    ns_coefficients: Annotated[tuple[float, float, float], FROM_LIST] = (3.4445, -4.775, 2.0315)
    eps: NotNegative = 1e-7
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None
    dtype: Literal["bf16", "fp32", "fp64"] = "bf16"
    #: options of AdamW for the parameters that are no matrices
    adamw: dict[str, Any] | None = None
