"""The section ``optimizer`` of a config. No torch."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from colossus.config.section import FROM_LIST, Named, Names, Positive, Section, require_type


class TableOptimizer(Named):
    """The optimizer of tables with sparse gradients, if it differs from that of other parameters."""

    #: SparseAdam, Adagrad, RowWiseAdagrad, SGD
    type: str
    #: learning rate; by default ``optimizer.lr``
    lr: Positive | None = None


class GroupRule(Section):
    """Options of the optimizer for the parameters whose names match."""

    model_config = ConfigDict(extra="allow")

    #: one pattern with * and ?, or several, of the parameters' full names
    match: Annotated[
        Names, BeforeValidator(lambda value: (value,) if isinstance(value, str) else value), Field(min_length=1)
    ]
    #: factor of their learning rate; 2.0 doubles it
    lr_scale: Positive | None = None
    #: True: they are not trained; False: they are, even if an earlier rule has frozen them
    frozen: bool | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The optimizer's own options."""
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _sets_something(self) -> GroupRule:
        if "lr" in self.options:
            raise ValueError("lr: a rule has a factor of optimizer.lr, which the schedule changes: lr_scale = 0.1")
        if not self.options and self.lr_scale is None and self.frozen is None:
            raise ValueError(f"sets nothing for {', '.join(self.match)}: add lr_scale, frozen or an option")
        return self


class Optimizer(Named):
    #: a name (AdamW, SGD, RMSprop, ..), "package.module:Class", or a callable of the parameters; options follow
    type: Annotated[Any, AfterValidator(require_type)] = "AdamW"
    #: peak of the learning rate
    lr: Positive = 3e-4
    #: [dict(match="*.bias", weight_decay=0.0), ..]: options by name of the parameter; if several rules match a
    #: parameter all apply, and a later one wins
    groups: Annotated[tuple[GroupRule, ...], FROM_LIST] = ()
    #: factor of each block's learning rate relative to the next block's; None: all have the same
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    #: whether the class needs whole parameters (norms of layers, SOAP): each is updated at a rank that owns it
    whole: bool = False
    #: another optimizer for tables with sparse gradients, dict(type=.., **options)
    tables: TableOptimizer | None = None

    @property
    def has_groups(self) -> bool:
        """Return whether some parameters have other options than others, or are frozen."""
        return bool(self.groups) or self.layer_decay is not None

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the class beside the parameters."""
        return {"lr": self.lr, **self.options}
