"""Options of the hybrid of all-reduce and owners of rows. No torch."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Literal

from colossus.engine.strategies.options.base import StrategyOptions


class HybridOptions(StrategyOptions):
    #: pattern of full names of tables -> "dense", "gather" or "owners"; the first that fits is taken
    ways: dict[str, Literal["dense", "gather", "owners"]] = {}

    def describe(self, data: int) -> str:
        return "exact: tables by rows"

    def way_of(self, name: str) -> str | None:
        """What the user has said of a table."""
        return next((way for pattern, way in self.ways.items() if fnmatchcase(name, pattern)), None)
