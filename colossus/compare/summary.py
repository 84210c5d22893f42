"""What runs' ``metrics.jsonl`` say of them, and the rows of the table: what each strategy or plan reached after equal
steps and after equal time, and what a step of it costs. No torch."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, Literal

from colossus.compare.jobs import Job
from colossus.launch import run_folder

State = Literal["done", "failed", "stopped", "not run"]
#: a training loss is the mean over this part of all steps: that of one step is one batch's
_WINDOW = 0.05
#: steps that are left out of speeds and costs: at most this many, and this part of all
_WARM_UP_STEPS, _WARM_UP = 10, 0.2


@dataclass(frozen=True)
class Ended:
    """How a job ended.

    Attributes:
        reason: one line, of what is not done.
    """

    state: State
    reason: str = ""
    code: int = 0


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
        """Rows that cannot be read are left out; of a step that was run again the last counts."""
        rows: dict[int, Mapping[str, Any]] = {}
        for line in path.read_bytes().splitlines() if path.exists() else []:
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
        """Training losses (of all replicas, or of the first where its own is all that is known), each the mean of the
        last 20th of all steps up to there."""
        losses = [_number(row.get("loss")) for row in self.rows]
        return [fmean(losses[max(0, end - self.window) : end]) for end in range(1, len(losses) + 1)]

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

    def loss_after(self, steps: int) -> float | None:
        return self._loss(bisect_right(self.steps, steps))

    def loss_at(self, seconds: float) -> float | None:
        return self._loss(bisect_right(self.seconds, seconds * (1 + 1e-9)))

    def _loss(self, num_rows: int) -> float | None:
        return self.losses[num_rows - 1] if num_rows else None

    def validation_after(self, steps: int) -> float | None:
        """That of the last evaluation not later than after ``steps``."""
        return next((loss for done, loss in reversed(self.validation.items()) if done <= steps), None)

    # -- what a step costs, without the first steps --------------------------------------------------------

    @cached_property
    def _warm(self) -> Sequence[Mapping[str, Any]]:
        return self.rows[min(_WARM_UP_STEPS, int(len(self.rows) * _WARM_UP)) :]

    @property
    def tokens_per_second(self) -> float | None:
        """Of all replicas, which make the same number of steps: tokens of all steps over their seconds."""
        seconds = sum(_number(row.get("step_seconds"), 0.0) for row in self._warm)
        tokens = sum(
            _number(row.get("tokens"), 0.0) * (1 if row.get("replica") is None else self.replicas) for row in self._warm
        )
        return tokens / seconds if seconds else None

    @property
    def step_seconds(self) -> float | None:
        """The median."""
        found = [_number(row["step_seconds"]) for row in self._warm if "step_seconds" in row]
        return median(found) if found else None

    @property
    def bytes_sent(self) -> float | None:
        """By the logging rank in a step, in the mean, along all axes and to parameter servers."""
        rows = [row["comm"] for row in self._warm if isinstance(row.get("comm"), Mapping)]
        pushed = self.mean("push_bytes")
        if not rows and pushed is None:
            return self.mean("peer_bytes_sent")
        counted = [sum(_number(axis.get("bytes"), 0.0) for axis in comm.values()) for comm in rows]
        return (fmean(counted) if counted else 0.0) + (pushed or 0.0)

    @property
    def wait_seconds(self) -> float | None:
        """For peers or servers, in a step, in the mean; None of strategies that do not measure it."""
        waited = self.mean("peer_wait_seconds")
        return self.mean("server_wait_seconds") if waited is None else waited

    @property
    def consensus_distance(self) -> float | None:
        """Of the replicas from their average, relative to its norm; the last that was measured."""
        key = "consensus_distance_relative"
        return next((_number(row[key]) for row in reversed(self.rows) if key in row), None)

    def mean(self, key: str) -> float | None:
        """Of the rows that have it."""
        found = [_number(row[key]) for row in self._warm if row.get(key) is not None]
        return fmean(found) if found else None


def _number(value: Any, otherwise: float = math.nan) -> float:
    return float(value) if isinstance(value, int | float) else otherwise


# -- the rows of the table --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mean:
    """Over the seeds: the mean, and the standard deviation where there are several."""

    mean: float
    deviation: float | None = None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Mean | None:
        """None where a run lacks it."""
        found = list(values)
        known = [value for value in found if value is not None]
        if not known or len(known) < len(found):
            return None
        return cls(fmean(known), stdev(known) if len(known) > 1 else None)


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        problems: one line for each of its runs that is not done; then there are no numbers.
        loss: training, after equal steps.
        validation_loss: after equal steps; of what the strategy evaluates, by default the average of the replicas.
        loss_at_time: training, after equal time.
        bytes_sent: by the logging rank, per step.
        tokens_ratio: to the first row's.
        loss_ratio: of the validation loss to the first row's; of the training loss where nothing was evaluated.
    """

    label: str
    problems: Sequence[str] = ()
    loss: Mean | None = None
    validation_loss: Mean | None = None
    loss_at_time: Mean | None = None
    step_seconds: Mean | None = None
    tokens_per_second: Mean | None = None
    bytes_sent: Mean | None = None
    wait_seconds: Mean | None = None
    consensus_distance: Mean | None = None
    tokens_ratio: float | None = None
    loss_ratio: float | None = None


@dataclass(frozen=True)
class Comparison:
    """The whole table.

    Attributes:
        equal_steps: the steps that all finished runs have done.
        equal_seconds: the time that the fastest of them took for all of its steps.
    """

    rows: Sequence[Row]
    equal_steps: int
    equal_seconds: float

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; numbers that are none are None."""
        rows = [_plain(asdict(row)) for row in self.rows]
        return {"equal_steps": self.equal_steps, "equal_seconds": self.equal_seconds, "rows": rows}


def compare(jobs: Sequence[Job], ended: Mapping[str, Ended]) -> Comparison:
    """Read the runs.

    Args:
        ended: name of a job -> how it ended; those that are missing have not been run.
    """
    curves: dict[str, list[Curve]] = {}
    problems: dict[str, list[str]] = {}
    for job in jobs:
        mine, lines = curves.setdefault(job.label, []), problems.setdefault(job.label, [])
        how = ended.get(job.name, Ended("not run"))
        if how.state == "done":
            mine.append(Curve.read(job.folder / run_folder.METRICS, job.config.parallel.data or 1))
        else:
            seed = "" if job.seed is None else f"seed {job.seed} "
            lines.append(f"{seed}{how.state}{f': {how.reason}' if how.reason else ''}")
    finished = {label: mine for label, mine in curves.items() if not problems[label]}
    every = [curve for mine in finished.values() for curve in mine if curve.rows]
    steps = min((curve.steps[-1] for curve in every), default=0)
    seconds = min((curve.seconds[-1] for curve in every), default=0.0)
    rows = [
        _row(label, finished[label], steps, seconds) if label in finished else Row(label, problems[label])
        for label in curves
    ]
    return Comparison([_with_ratios(row, rows[0]) for row in rows], steps, seconds)


def _row(label: str, curves: Sequence[Curve], steps: int, seconds: float) -> Row:
    return Row(
        label,
        loss=Mean.of(curve.loss_after(steps) for curve in curves),
        validation_loss=Mean.of(curve.validation_after(steps) for curve in curves),
        loss_at_time=Mean.of(curve.loss_at(seconds) for curve in curves),
        step_seconds=Mean.of(curve.step_seconds for curve in curves),
        tokens_per_second=Mean.of(curve.tokens_per_second for curve in curves),
        bytes_sent=Mean.of(curve.bytes_sent for curve in curves),
        wait_seconds=Mean.of(curve.wait_seconds for curve in curves),
        consensus_distance=Mean.of(curve.consensus_distance for curve in curves),
    )


def _with_ratios(row: Row, first: Row) -> Row:
    loss = "validation_loss" if first.validation_loss else "loss"
    ratios = [_ratio(getattr(row, name), getattr(first, name)) for name in (loss, "tokens_per_second")]
    return replace(row, loss_ratio=ratios[0], tokens_ratio=ratios[1])


def _ratio(value: Mean | None, first: Mean | None) -> float | None:
    return value.mean / first.mean if value is not None and first is not None and first.mean else None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
