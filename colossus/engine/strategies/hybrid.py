"""Every parameter by the cheapest exact way: dense gradients all-reduced, those of tables by rows."""

from __future__ import annotations

from typing import Any

from colossus.engine.strategies.all_reduce import AllReduce
from colossus.engine.strategies.options.hybrid import HybridOptions


class Hybrid(AllReduce):
    """Exact. Dense gradients are all-reduced in buckets; of each table (``sparse=True``) the gradient of its rows takes
    the way that sends the fewest bytes, after Parallax (1808.02621).
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = HybridOptions(**options)

    def way_of(self, name: str, shape: tuple[int, ...], ranks: int) -> str:
        return self.options.way_of(name) or ("owners" if shape[0] >= ranks else "dense")
