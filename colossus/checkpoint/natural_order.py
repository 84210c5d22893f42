"""Names with numbers in them, sorted as a reader would. No torch."""

from __future__ import annotations

import re


def natural_order(name: str) -> list[tuple[int, str]]:
    """A key for sorting: ``blocks.2`` before ``blocks.10``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
