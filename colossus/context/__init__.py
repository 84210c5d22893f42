"""Ranks, axes and process groups. Only this package knows global ranks."""

from typing import TYPE_CHECKING

from colossus._lazy import lazy_names

if TYPE_CHECKING:
    from colossus.context.grid import LayerOptions, RankGrid, build_grid
    from colossus.context.groups import AxisGroup
    from colossus.context.parallel_context import ParallelContext, current_context
    from colossus.context.rng_streams import RngStreams

__all__ = ["AxisGroup", "LayerOptions", "ParallelContext", "RankGrid", "RngStreams", "build_grid", "current_context"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "RankGrid": "grid",
        "build_grid": "grid",
        "AxisGroup": "groups",
        "LayerOptions": "grid",
        "ParallelContext": "parallel_context",
        "current_context": "parallel_context",
        "RngStreams": "rng_streams",
    },
)
