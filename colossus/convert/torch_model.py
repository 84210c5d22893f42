"""``model = dict(type="torch", factory="package.module:function", ..)``: a model of plain torch in a config."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from colossus.convert.parallelize import parallelize


def torch_model(
    factory: str | Callable[..., nn.Module],
    kwargs: Mapping[str, Any] | None = None,
    rules: Mapping[str, str] | None = None,
    example: Any = None,
    blocks: str | Sequence[str] | None = None,
) -> nn.Module:
    """The model that ``factory(**kwargs)`` makes, by `colossus.parallelize`.

    Args:
        factory: a class or function, or ``"package.module:name"`` of one.
        kwargs: its arguments.
        rules, example, blocks: as of `colossus.parallelize`.

    Raises:
        ValueError: when there is no such function.
    """
    found = _imported(factory) if isinstance(factory, str) else factory
    return parallelize(partial(found, **(kwargs or {})), rules, example=example, blocks=blocks)()


def _imported(name: str) -> Callable[..., nn.Module]:
    module, _, attribute = name.partition(":")
    try:
        found = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f'factory = {name!r}: is no "package.module:function" that can be imported: {error}') from None
    if not callable(found):
        raise ValueError(f"factory = {name!r}: is a {type(found).__name__}, which cannot be called")
    return found
