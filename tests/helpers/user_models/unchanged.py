"""Models of plain torch, parallelized as they are, as rows of the table of user models: their oracle is themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from helpers.user_models.cases import Batch, Loss, PlainKit, UserModel
from torch import nn

import colossus


def unchanged(
    name: str,
    build: Callable[[], nn.Module],
    batch: Callable[[int], Batch],
    loss: Loss,
    *,
    example: Any = None,
    factory: Callable[[], nn.Module] | None = None,
    refused: Mapping[str, str] | None = None,
    **options: Any,
) -> UserModel:
    """Return the row of a model that ``build`` makes.

    Args:
        example: for `colossus.parallelize`; of transformers' models it knows what they are called with.
        factory: what is parallelized, by default ``build``.
        options: further fields of the row.
    """

    def make(kit: Any) -> nn.Module:
        if kit is not PlainKit:
            return colossus.parallelize(factory or build, example=example)()
        net = build()
        net.register_forward_pre_hook(_by_keywords, with_kwargs=True)
        return net

    return UserModel(name, make, batch, loss, refused or {}, **options)


def _by_keywords(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return ((), args[0]) if isinstance(args[0], dict) else (args, kwargs)
