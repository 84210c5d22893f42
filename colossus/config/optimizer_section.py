"""The section ``optimizer`` of a config. No torch."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator

from colossus.config.section import Named, Positive, require_type


class TableOptimizer(Named):
    """Of tables with sparse gradients, where it is another than that of the other parameters."""

    #: SparseAdam, Adagrad, RowWiseAdagrad, SGD
    type: str
    #: by default ``optimizer.lr``
    lr: Positive | None = None


class Optimizer(Named):
    #: AdamW, Adam, Adagrad, SGD, or a callable that takes the parameters; options are torch's
    type: Annotated[Any, AfterValidator(require_type)] = "AdamW"
    #: the peak of the learning rate
    lr: Positive = 3e-4
    #: runs a class that needs whole parameters (norms of layers, SOAP): each at a rank that owns it
    whole: bool = False
    #: another optimizer for tables with sparse gradients, dict(type=.., **options)
    tables: TableOptimizer | None = None

    def spec(self) -> dict[str, Any]:
        """What the class is made with."""
        return {key: value for key, value in super().spec().items() if key not in ("tables", "whole")}
