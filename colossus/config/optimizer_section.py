"""The section ``optimizer`` of a config. No torch."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from colossus.config.section import FROM_LIST, Named, Names, Positive, Section, require_type

#: of the optimizers that have them: options of groups alone
GROUP_OPTIONS = {"LAMB": ("adapt",), "LARS": ("adapt",), "Muon": ("muon",)}


class TableOptimizer(Named):
    """Of tables with sparse gradients, where it is another than that of the other parameters."""

    #: SparseAdam, Adagrad, RowWiseAdagrad, SGD
    type: str
    #: by default ``optimizer.lr``
    lr: Positive | None = None


class GroupRule(Section):
    """Options of the optimizer for the parameters whose names are matched."""

    model_config = ConfigDict(extra="allow")

    #: patterns with * and ?, or one: of the parameters' full names
    match: Annotated[
        Names, BeforeValidator(lambda value: (value,) if isinstance(value, str) else value), Field(min_length=1)
    ]
    #: their learning rate as a part of that of the others; 2.0 is twice as much
    lr_scale: Positive | None = None
    #: True: they are not trained; False: neither are they frozen by an earlier rule
    frozen: bool | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Those that are the optimizer's own."""
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _says_something(self) -> GroupRule:
        if "lr" in self.options:
            raise ValueError("lr: a rule gives its part of optimizer.lr, which the schedule changes: lr_scale = 0.1")
        if not self.options and self.lr_scale is None and self.frozen is None:
            raise ValueError(f"says nothing of {', '.join(self.match)}: give lr_scale, frozen or an option")
        return self


class Optimizer(Named):
    #: a name (AdamW, SGD, RMSprop, ..), "package.module:Class", or a callable that takes the parameters; options follow
    type: Annotated[Any, AfterValidator(require_type)] = "AdamW"
    #: the peak of the learning rate
    lr: Positive = 3e-4
    #: [dict(match="*.bias", weight_decay=0.0), ..]: options by name; a parameter takes those of all rules that match
    #: it, of two that differ those of the later
    groups: Annotated[tuple[GroupRule, ...], FROM_LIST] = ()
    #: the learning rate of each block is this part of that of the block behind it; None: all have the same
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    #: runs a class that needs whole parameters (norms of layers, SOAP): each at a rank that owns it
    whole: bool = False
    #: another optimizer for tables with sparse gradients, dict(type=.., **options)
    tables: TableOptimizer | None = None

    @property
    def has_groups(self) -> bool:
        """Whether some parameters are trained otherwise than others, or not at all."""
        return bool(self.groups) or self.layer_decay is not None

    @property
    def arguments(self) -> dict[str, Any]:
        """What the class takes beside the parameters."""
        return {"lr": self.lr, **self.options}
