"""Options of torch's optimizers that work element by element, beside ``lr``, with torch's defaults. No torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from colossus.config.section import FROM_LIST, Fraction, NotNegative, Positive
from colossus.optim.optimizer_options import Betas, Nesterov, OptimizerOptions


class _Options(OptimizerOptions):
    weight_decay: NotNegative = 0.0
    foreach: bool | None = None
    maximize: bool = False
    differentiable: bool = False


class _Capturable(_Options):
    capturable: bool = False


class _Adam(_Capturable):
    betas: Betas = (0.9, 0.999)
    eps: NotNegative = 1e-8


class _WithKernel(_Options):
    fused: bool | None = None

    @model_validator(mode="after")
    def _one_kernel(self) -> _WithKernel:
        other = next((name for name in ("foreach", "differentiable") if getattr(self, name)), None)
        if self.fused and other:
            raise ValueError(f"fused = True and {other} = True: torch has no kernel that is both; leave one out")
        return self


class AdamOptions(_Adam, _WithKernel):
    amsgrad: bool = False
    decoupled_weight_decay: bool = False


class AdamWOptions(_Adam, _WithKernel):
    weight_decay: NotNegative = 0.01
    amsgrad: bool = False


class NAdamOptions(_Adam):
    momentum_decay: NotNegative = 4e-3
    decoupled_weight_decay: bool = False


class RAdamOptions(_Adam):
    decoupled_weight_decay: bool = False


class AdamaxOptions(_Adam):
    pass


class SGDOptions(_WithKernel):
    momentum: NotNegative = 0.0
    dampening: float = 0.0
    nesterov: Nesterov = False


class AdagradOptions(_WithKernel):
    lr_decay: NotNegative = 0.0
    initial_accumulator_value: NotNegative = 0.0
    eps: NotNegative = 1e-10


class RMSpropOptions(_Capturable):
    alpha: NotNegative = 0.99
    eps: NotNegative = 1e-8
    momentum: NotNegative = 0.0
    centered: bool = False


class AdadeltaOptions(_Capturable):
    rho: Fraction = 0.9
    eps: NotNegative = 1e-6


class ASGDOptions(_Capturable):
    lambd: float = 1e-4
    alpha: float = 0.75
    t0: float = 1e6


class RpropOptions(OptimizerOptions):
    etas: Annotated[tuple[Annotated[float, Field(gt=0, lt=1)], Annotated[float, Field(gt=1)]], FROM_LIST] = (0.5, 1.2)
    step_sizes: Annotated[tuple[Positive, Positive], FROM_LIST] = (1e-6, 50.0)
    foreach: bool | None = None
    maximize: bool = False
    differentiable: bool = False
    capturable: bool = False
