"""The rows of the table: what each strategy or plan reached after equal steps and after equal time, and its cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, stdev
from typing import Any

from colossus.compare.curves import Curve
from colossus.compare.jobs import Job
from colossus.compare.runs import Ended
from colossus.launch import run_folder


@dataclass(frozen=True)
class Mean:
    """Over the seeds: the mean, and the standard deviation where there are several."""

    mean: float
    deviation: float | None = None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Mean | None:
        """None where a run lacks it."""
        found = list(values)
        if not found or any(value is None for value in found):
            return None
        known = [value for value in found if value is not None]
        return cls(fmean(known), stdev(known) if len(known) > 1 else None)


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        problems: one line for each of its runs that is not done; then there are no numbers.
        loss: training, after equal steps.
        validation_loss: after equal steps; of what the strategy evaluates, by default the average of the replicas.
        loss_at_time: training, after equal time; ``steps_at_time`` of them were done then.
        bytes_sent: by the logging rank, per step.
        tokens_ratio: to the first row's.
        loss_ratio: of the validation loss to the first row's; of the training loss where nothing was evaluated.
    """

    label: str
    problems: Sequence[str] = ()
    loss: Mean | None = None
    validation_loss: Mean | None = None
    loss_at_time: Mean | None = None
    validation_loss_at_time: Mean | None = None
    steps_at_time: Mean | None = None
    seconds: Mean | None = None
    step_seconds: Mean | None = None
    tokens_per_second: Mean | None = None
    bytes_sent: Mean | None = None
    bytes_by_axis: Mapping[str, float] | None = None
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
        curves: label -> of its finished runs.
    """

    rows: Sequence[Row]
    equal_steps: int
    equal_seconds: float
    curves: Mapping[str, Sequence[Curve]]

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
    return Comparison([_with_ratios(row, rows[0]) for row in rows], steps, seconds, finished)


def _row(label: str, curves: Sequence[Curve], steps: int, seconds: float) -> Row:
    def at(index: int | None, values: Sequence[float]) -> float | None:
        return None if index is None else values[index]

    after = [curve.index_of_step(steps) for curve in curves]
    timely = [curve.index_at(seconds) for curve in curves]
    pairs = list(zip(curves, timely, strict=True))
    axes = sorted({axis for curve in curves for axis in curve.bytes_by_axis})
    return Row(
        label,
        loss=Mean.of(at(index, curve.smooth_losses) for curve, index in zip(curves, after, strict=True)),
        validation_loss=Mean.of(curve.validation_up_to(steps) for curve in curves),
        loss_at_time=Mean.of(at(index, curve.smooth_losses) for curve, index in pairs),
        validation_loss_at_time=Mean.of(
            None if index is None else curve.validation_up_to(curve.steps[index]) for curve, index in pairs
        ),
        steps_at_time=Mean.of(at(index, curve.steps) or 0 for curve, index in pairs),
        seconds=Mean.of(curve.seconds[-1] if curve.seconds else None for curve in curves),
        step_seconds=Mean.of(curve.step_seconds for curve in curves),
        tokens_per_second=Mean.of(curve.tokens_per_second for curve in curves),
        bytes_sent=Mean.of(curve.bytes_sent for curve in curves),
        bytes_by_axis={axis: fmean(curve.bytes_by_axis.get(axis, 0.0) for curve in curves) for axis in axes},
        wait_seconds=Mean.of(curve.wait_seconds for curve in curves),
        consensus_distance=Mean.of(curve.consensus_distance for curve in curves),
    )


def _with_ratios(row: Row, first: Row) -> Row:
    loss = ("validation_loss" if first.validation_loss else "loss"), "tokens_per_second"
    ratios = [_ratio(getattr(row, name), getattr(first, name)) for name in loss]
    return replace(row, loss_ratio=ratios[0], tokens_ratio=ratios[1])


def _ratio(value: Mean | None, first: Mean | None) -> float | None:
    return value.mean / first.mean if value is not None and first is not None and first.mean else None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
