"""One thing that was compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from colossus.verify.difference import Difference


@dataclass(frozen=True)
class Finding:
    """One thing that was compared.

    Attributes:
        name: of the parameter or module; empty for a number of the whole step.
        rank: whose value it is, when the ranks were compared one by one.
        message: what is wrong, when it is not a number that differs.
        copy_of: for a copy, what it is a copy of (``gradient``).
        other_rank: for a copy, the rank whose value it should have.
        by_rank: for an output, the relative difference on each rank that has it; ``rank`` has the largest (the first).
        stage: for an output, the pipeline stage that computed it.
    """

    name: str
    difference: Difference
    rank: int | None = None
    message: str = ""
    copy_of: str = ""
    other_rank: int = 0
    by_rank: Mapping[int, float] = field(default_factory=dict)
    stage: int = 0
