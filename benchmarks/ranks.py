"""Groups of ranks that stay alive, one thread each, under the name of a case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from colossus.context.local_ranks import LocalRanks, RanksFailed

# before the first operation: a parent that has run threads leaves forked children without them, and they hang
torch.set_num_threads(1)


class RankGroup(LocalRanks):
    """`LocalRanks` whose errors begin with the name of a case.

    Args:
        make: rank -> the object, built in the child after the process group.
        timeout: seconds without progress after which a call is given up.

    Raises:
        RuntimeError: with the traceback of the first rank that failed, or when nothing moves any more.
    """

    def __init__(self, name: str, world: int, make: Callable[[int], Any], timeout: float = 300.0) -> None:
        self.name = name
        super().__init__(world, make, patience=timeout)

    def slowest(self, method: str, *args: Any) -> float:
        """Return the largest of what the ranks return, the seconds of the slowest."""
        return max(self.call(method, *args))

    def peak_of(self, method: str, *args: Any) -> int | None:
        """Return the largest of the bytes that the ranks return, None where a rank knows none, and end the ranks."""
        with self:
            grown = self.call(method, *args)
        return None if None in grown else max(grown)

    def _collect(self) -> list[Any]:
        try:
            return super()._collect()
        except RanksFailed as error:
            raise RuntimeError(f"{self.name}: {error}") from None
