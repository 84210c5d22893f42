"""What a plan was predicted to move and to hold beside what was counted, as a table and as JSON. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from colossus.arithmetic import aligned, byte_count, named_ranks


@dataclass(frozen=True)
class Compared:
    """Bytes: ``what`` is an axis, or a kind of memory."""

    what: str
    predicted: float
    counted: float

    @property
    def is_equal(self) -> bool:
        """To the byte: shares of a ring are no whole numbers, and are added in another order."""
        return math.isclose(self.predicted, self.counted, rel_tol=1e-9, abs_tol=1e-6)

    @property
    def verdict(self) -> str:
        """In words."""
        return "equal" if self.is_equal else f"counted {self.counted - self.predicted:+,.0f} B"


@dataclass(frozen=True)
class CheckedRank:
    """The memory of one rank.

    Attributes:
        rank: of the world.
        stored: weights, gradients and the state of the optimizer between steps.
        peak: at most in a step.
        operations: what the rank does in a step, as rows of operation, axes, calls, bytes.
        seconds: that the count took.
    """

    rank: int
    pipeline_rank: int
    stored: Sequence[Compared]
    peak: Compared
    operations: Sequence[Mapping[str, Any]]
    seconds: float

    @property
    def ratio(self) -> float:
        """Of the peaks, predicted over counted."""
        return self.peak.predicted / self.peak.counted


@dataclass(frozen=True)
class CheckReport:
    """Of a plan.

    Attributes:
        world_size: ranks of the plan.
        axes: bytes that a rank sends along each axis in a step; of the rank that sends most.
        ranks: those that were counted.
    """

    world_size: int
    axes: Sequence[Compared]
    ranks: Sequence[CheckedRank]

    @property
    def is_equal(self) -> bool:
        """Whether all that must be equal is: bytes by axis, and what is stored. Peaks are compared, and not judged."""
        stored = (row for rank in self.ranks for row in rank.stored)
        return all(row.is_equal for row in (*self.axes, *stored))

    def render(self) -> str:
        """As tables."""
        ranks, seconds = named_ranks([rank.rank for rank in self.ranks]), sum(rank.seconds for rank in self.ranks)
        head = f"checked     a step of {ranks} of {self.world_size:,} on tensors without values, in {seconds:.0f} s"
        axes = [("axis", "predicted", "counted", ""), *map(_cells, self.axes)]
        memory = [("pipeline rank", "bytes", "predicted", "counted", "")]
        for rank in self.ranks:
            memory += [(str(rank.pipeline_rank), *_cells(row)) for row in rank.stored]
            memory.append((str(rank.pipeline_rank), *_cells(rank.peak)[:-1], f"predicted / counted {rank.ratio:.3f}"))
        sections = [head, aligned(axes, left=(0, 3)), aligned(memory, left=(1, 4))]
        return "\n\n".join(sections if self.axes else [head, sections[-1]])

    def as_json(self) -> dict[str, Any]:
        """In bytes and seconds."""
        ranks = [
            {
                "rank": rank.rank,
                "pipeline_rank": rank.pipeline_rank,
                "stored": _rows(rank.stored),
                "peak": {**asdict(rank.peak), "ratio": rank.ratio},
                "operations": rank.operations,
                "seconds": rank.seconds,
            }
            for rank in self.ranks
        ]
        return {"equal": self.is_equal, "world_size": self.world_size, "axes": _rows(self.axes), "ranks": ranks}


def _cells(row: Compared) -> tuple[str, str, str, str]:
    return row.what, byte_count(row.predicted), byte_count(row.counted), row.verdict


def _rows(rows: Iterable[Compared]) -> list[dict[str, Any]]:
    return [{**asdict(row), "equal": row.is_equal} for row in rows]
