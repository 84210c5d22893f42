"""Layouts: how tensors are sharded over mesh axes, and the moves between layouts. `Layout` itself needs no torch."""

from typing import TYPE_CHECKING

from colossus._lazy import lazy_names

if TYPE_CHECKING:
    from colossus.layout.activation import Activation
    from colossus.layout.layout import Layout
    from colossus.layout.moves import Move
    from colossus.layout.redistribute import gather, shard

__all__ = ["Activation", "Layout", "Move", "gather", "shard"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Activation": "activation",
        "Layout": "layout",
        "Move": "moves",
        "gather": "redistribute",
        "shard": "redistribute",
    },
)
