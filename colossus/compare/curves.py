"""What a run's ``metrics.jsonl`` says of it: losses over steps and over time, and what a step costs. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median
from typing import Any

#: a training loss is the mean over this part of all steps: that of one step is one batch's
_WINDOW = 0.05
#: steps that are left out of speeds and costs: at most this many, and this part of all
_WARM_UP_STEPS, _WARM_UP = 10, 0.2


@dataclass(frozen=True)
class Curve:
    """One run's rows, those of its first steps first.

    The clock counts the seconds of steps: not those of evaluations and checkpoints, nor those in which a stopped run
    stood still.

    Attributes:
        replicas: of the run: a row with ``replica`` counts the tokens of one of them.
    """

    rows: Sequence[Mapping[str, Any]]
    replicas: int = 1

    @classmethod
    def read(cls, path: Path, replicas: int = 1) -> Curve:
        """Rows that cannot be read are left out."""
        rows: dict[int, Mapping[str, Any]] = {}
        try:
            lines = path.read_bytes().splitlines()
        except OSError:
            lines = []
        for line in lines:
            try:
                row = json.loads(line)
                rows[int(row["step"])] = row
            except (ValueError, KeyError, TypeError):
                continue
        return cls([rows[step] for step in sorted(rows)], replicas)

    @cached_property
    def steps(self) -> list[int]:
        return [row["step"] for row in self.rows]

    @cached_property
    def losses(self) -> list[float]:
        """Of each step: of all replicas, or of the first one where its own is all that is known."""
        return [_number(row.get("loss")) for row in self.rows]

    @cached_property
    def smooth_losses(self) -> list[float]:
        """The same, each the mean of the last 20th of all steps up to there."""
        width = self.window
        return [fmean(self.losses[max(0, end - width) : end]) for end in range(1, len(self.losses) + 1)]

    @cached_property
    def seconds(self) -> list[float]:
        """At the end of each step, since the first began."""
        return list(accumulate(_number(row.get("step_seconds"), 0.0) for row in self.rows))

    @cached_property
    def validation(self) -> dict[int, float]:
        """Step -> validation loss."""
        return {row["step"]: _number(row["validation_loss"]) for row in self.rows if "validation_loss" in row}

    @property
    def window(self) -> int:
        return max(1, round(len(self.rows) * _WINDOW))

    @cached_property
    def _warm(self) -> Sequence[Mapping[str, Any]]:
        return self.rows[min(_WARM_UP_STEPS, int(len(self.rows) * _WARM_UP)) :]

    # -- after equal steps, after equal time ---------------------------------------------------------------

    def index_of_step(self, step: int) -> int | None:
        """Of the last row up to ``step``."""
        return self._last([done <= step for done in self.steps])

    def index_at(self, seconds: float) -> int | None:
        """Of the last row whose step was over after ``seconds``."""
        return self._last([passed <= seconds * (1 + 1e-9) for passed in self.seconds])

    def _last(self, are_within: Sequence[bool]) -> int | None:
        return sum(are_within) - 1 if any(are_within) else None

    def validation_up_to(self, step: int) -> float | None:
        """That of the last evaluation not later than after ``step``."""
        return next((loss for done, loss in reversed(self.validation.items()) if done <= step), None)

    # -- what a step costs, without the first steps --------------------------------------------------------

    @property
    def tokens_per_second(self) -> float | None:
        """Of all replicas: tokens of all steps over their seconds. All replicas make the same number of steps, and the
        first one waits for the others where they meet."""
        seconds = sum(_number(row.get("step_seconds"), 0.0) for row in self._warm)
        tokens = sum(_number(row.get("tokens"), 0.0) * self._counted_by(row) for row in self._warm)
        return tokens / seconds if seconds else None

    def _counted_by(self, row: Mapping[str, Any]) -> int:
        return 1 if row.get("replica") is None else self.replicas

    @property
    def step_seconds(self) -> float | None:
        """The median."""
        found = [_number(row["step_seconds"]) for row in self._warm if "step_seconds" in row]
        return median(found) if found else None

    @property
    def bytes_by_axis(self) -> dict[str, float]:
        """Axis -> bytes that the logging rank sends in a step, in the mean; "servers": to parameter servers."""
        rows = [row["comm"] for row in self._warm if isinstance(row.get("comm"), Mapping)]
        axes = sorted({axis for comm in rows for axis in comm})
        found = {axis: sum(_number(comm.get(axis, {}).get("bytes"), 0.0) for comm in rows) / len(rows) for axis in axes}
        pushed = self.mean("push_bytes")
        return found if pushed is None else {**found, "servers": pushed}

    @property
    def bytes_sent(self) -> float | None:
        """By the logging rank in a step, in the mean, along all axes and to parameter servers."""
        if any("comm" in row or "push_bytes" in row for row in self._warm):
            return sum(self.bytes_by_axis.values())
        return self.mean("peer_bytes_sent")

    @property
    def wait_seconds(self) -> float | None:
        """For peers or servers, in a step, in the mean; None of strategies that do not measure it."""
        waited = [self.mean(key) for key in ("peer_wait_seconds", "server_wait_seconds")]
        return next((seconds for seconds in waited if seconds is not None), None)

    @property
    def consensus_distance(self) -> float | None:
        """Of the replicas from their average, relative to its norm; the last that was measured."""
        key = "consensus_distance_relative"
        return next((_number(row[key]) for row in reversed(self.rows) if key in row), None)

    def mean(self, key: str) -> float | None:
        """Of the rows that have it."""
        found = [_number(row[key]) for row in self._warm if row.get(key) is not None]
        return fmean(found) if found else None


def _number(value: Any, otherwise: float = float("nan")) -> float:
    return float(value) if isinstance(value, int | float) else otherwise
