"""The types of ``optimizer.tables``: the options of each, and the rule in `colossus.rows.row_rules`. No torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator

from colossus.config.errors import brief
from colossus.config.section import NotNegative, Section
from colossus.optim.optimizer_options import Betas, Nesterov


def _only(right: Any, why: str) -> AfterValidator:
    def check(value: Any) -> Any:
        if value != right:
            raise ValueError(f"{why}, got {brief(value)}")
        return value

    return AfterValidator(check)


class TableOptions(Section):
    """Base of the options of optimizers of tables with sparse gradients."""

    rule_name: ClassVar[str] = ""

    maximize: bool = False
    weight_decay: Annotated[float, _only(0, "must be 0: rows that a step has not looked up would not decay")] = 0.0

    @property
    def rule(self) -> str:
        """The name of the rule."""
        return self.rule_name

    @property
    def arguments(self) -> dict[str, Any]:
        """The options of the rule beside ``lr``."""
        names = [name for name in type(self).model_fields if name not in ("weight_decay", "amsgrad")]
        return {name: getattr(self, name) for name in names}


class SGDOptions(TableOptions):
    momentum: NotNegative = 0.0
    dampening: float = 0.0
    nesterov: Nesterov = False

    @property
    def rule(self) -> str:
        return "momentum" if self.momentum else "sgd"


class AdagradOptions(TableOptions):
    rule_name = "adagrad"

    lr_decay: NotNegative = 0.0
    eps: NotNegative = 1e-10
    initial_accumulator_value: NotNegative = 0.0


class RowWiseAdagradOptions(TableOptions):
    rule_name = "rowwise_adagrad"

    eps: NotNegative = 1e-8
    initial_accumulator_value: NotNegative = 0.0


class SparseAdamOptions(TableOptions):
    rule_name = "adam"

    betas: Betas = (0.9, 0.999)
    eps: NotNegative = 1e-8
    amsgrad: Annotated[bool, _only(False, "must be False: there is no form of amsgrad for rows")] = False
