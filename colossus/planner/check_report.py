"""The report of a plan's check: predicted bytes and seconds beside counted ones, as tables and as JSON. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from colossus.arithmetic import aligned, byte_count, named_ranks


@dataclass(frozen=True)
class Compared:
    """Predicted and counted bytes of ``what``: an axis, or a kind of memory."""

    what: str
    predicted: float
    counted: float

    @property
    def is_equal(self) -> bool:
        """Return whether the two agree to the byte."""
        # Shares of a ring are not whole numbers, and are added in another order.
        return math.isclose(self.predicted, self.counted, rel_tol=1e-9, abs_tol=1e-6)

    @property
    def verdict(self) -> str:
        """Return the comparison in words."""
        return "equal" if self.is_equal else f"counted {self.counted - self.predicted:+,.0f} B"


@dataclass(frozen=True)
class CheckedRank:
    """The check of one rank.

    Attributes:
        rank: rank in the world.
        pipeline_rank: index along the pipeline.
        stored: bytes of weights, gradients and optimizer state between steps.
        peak: the most bytes in a step.
        operations: collectives of the rank in a step, as rows of operation, axes, calls, bytes.
        seconds: seconds that counting took.
    """

    rank: int
    pipeline_rank: int
    stored: Sequence[Compared]
    peak: Compared
    operations: Sequence[Mapping[str, Any]]
    seconds: float

    @property
    def ratio(self) -> float:
        """Return the predicted peak over the counted one."""
        return self.peak.predicted / self.peak.counted


@dataclass(frozen=True)
class CheckReport:
    """The check of a plan.

    Attributes:
        world_size: ranks of the plan.
        axes: bytes along each axis in a step, of the rank that sends most.
        ranks: the ranks whose step was counted.
        seconds: predicted and played seconds (see `colossus.planner.device_play`) of the step, and those in which
            collectives along each axis are exposed; then the lines that wait longest, which nothing predicts.
    """

    world_size: int
    axes: Sequence[Compared]
    ranks: Sequence[CheckedRank]
    seconds: Sequence[tuple[str, float | None, float]] = ()

    @property
    def is_equal(self) -> bool:
        """Return whether bytes along axes and stored bytes agree. Peaks are shown, but need not agree."""
        stored = (row for rank in self.ranks for row in rank.stored)
        return all(row.is_equal for row in (*self.axes, *stored))

    def render(self) -> str:
        """Return the report as tables."""
        ranks, seconds = named_ranks([rank.rank for rank in self.ranks]), sum(rank.seconds for rank in self.ranks)
        head = f"checked     a step of {ranks} of {self.world_size:,} on tensors without values, in {seconds:.0f} s"
        axes = [("axis", "predicted", "counted", ""), *map(_cells, self.axes)]
        memory = [("pipeline rank", "bytes", "predicted", "counted", "")]
        for rank in self.ranks:
            memory += [(str(rank.pipeline_rank), *_cells(row)) for row in rank.stored]
            memory.append((str(rank.pipeline_rank), *_cells(rank.peak)[:-1], f"predicted / counted {rank.ratio:.3f}"))
        sections = [head, aligned(axes, left_columns=(0, 3)), aligned(memory, left_columns=(1, 4))]
        sections = sections if self.axes else [head, sections[-1]]
        if self.seconds:
            rows = [
                (name, "" if predicted is None else _milliseconds(predicted), _milliseconds(played))
                for name, predicted, played in self.seconds
            ]
            sections.append(aligned([("seconds", "predicted", "played"), *rows], left_columns=(0,)))
        return "\n\n".join(sections)

    def as_json(self) -> dict[str, Any]:
        """Return the report, in bytes and seconds, as an object for JSON."""
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
        seconds = [{"what": name, "predicted": predicted, "played": played} for name, predicted, played in self.seconds]
        report = {"equal": self.is_equal, "world_size": self.world_size, "axes": _rows(self.axes), "ranks": ranks}
        return {**report, "seconds": seconds}


def _cells(row: Compared) -> tuple[str, str, str, str]:
    return row.what, byte_count(row.predicted), byte_count(row.counted), row.verdict


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _rows(rows: Iterable[Compared]) -> list[dict[str, Any]]:
    return [{**asdict(row), "equal": row.is_equal} for row in rows]
