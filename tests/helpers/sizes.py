"""How many parameters a model has."""

from __future__ import annotations

from typing import Any

from colossus.construct.build_model import build
from colossus.context.parallel_context import one_rank
from colossus.layout.parameter import num_parameters
from colossus.registry import MODELS


def count_parameters(model: dict[str, Any]) -> int:
    """Of ``dict(type=.., **options)``, counted on the meta device."""
    return num_parameters(build(lambda: MODELS.build(model), one_rank(), materialize=False))
