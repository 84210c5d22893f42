"""What belongs to single ranks is saved under ``ranks/<rank>/<what>``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def own_path(rank: int, what: str) -> str:
    return f"ranks/{rank}/{what}"


def of_ranks(values: Mapping[str, Any], what: str) -> dict[int, Any]:
    """What the ranks of a checkpoint gave of one kind, by rank in order."""
    found = {}
    for path, value in values.items():
        root, _, rest = path.partition("/")
        rank, _, kind = rest.partition("/")
        if root == "ranks" and kind == what:
            found[int(rank)] = value
    return dict(sorted(found.items()))
