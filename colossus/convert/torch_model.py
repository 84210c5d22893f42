"""``model = dict(type="torch", factory="package.module:function", ..)``: a model of plain torch in a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from colossus.convert.parallelize import parallelize
from colossus.import_path import imported


def torch_model(
    factory: str | Callable[..., nn.Module],
    kwargs: Mapping[str, Any] | None = None,
    rules: Mapping[str, str] | None = None,
    example: Any = None,
    blocks: str | Sequence[str] | None = None,
) -> nn.Module:
    """Return the model of ``factory(**kwargs)``, by `colossus.parallelize`.

    Args:
        factory: a class or function, or ``"package.module:name"`` of one.
        kwargs: its arguments.
        rules, example, blocks: see `colossus.parallelize`.

    Raises:
        ValueError: there is no such function.
    """
    try:
        make = imported(factory) if isinstance(factory, str) else factory
    except ValueError as error:
        raise ValueError(f"factory = {error}") from error
    return parallelize(partial(make, **(kwargs or {})), rules, example=example, blocks=blocks)()
