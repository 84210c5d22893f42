"""The table of a comparison, from the runs' ``metrics.jsonl``. No torch.

It shows the loss of each strategy or plan after equal steps and after equal time, and the cost of a step.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import numpy as np
from rich.console import Console

from colossus.arithmetic import byte_count, clock
from colossus.compare.jobs import Job
from colossus.compare.printed_rows import print_lines, print_rows, seconds_text
from colossus.launch import run_folder
from colossus.launch.run_metrics import RunMetrics

#: a training loss is the mean over this fraction of all steps, since the loss of one step is that of one batch
_WINDOW = 0.05
#: speeds and costs leave out the first steps: at most this many, and at most this fraction of all
_WARM_UP_STEPS, _WARM_UP = 10, 0.2


@dataclass(frozen=True)
class Ended:
    """The end of a job.

    Attributes:
        reason: one line, for a job that is not done.
    """

    state: Literal["done", "failed", "stopped", "not run"]
    reason: str = ""
    code: int = 0


class Curve(RunMetrics):
    """The rows of one run, with its values after a number of steps or seconds."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._warm_up = min(_WARM_UP_STEPS, int(len(self.rows) * _WARM_UP))

    def loss_after(self, steps: int) -> float | None:
        return self._loss(bisect_right(self.steps, steps))

    def loss_at(self, seconds: float) -> float | None:
        return self._loss(bisect_right(self.seconds, seconds * (1 + 1e-9)))

    def _loss(self, num_rows: int) -> float | None:
        window = max(1, round(len(self.rows) * _WINDOW))
        return _mean(self._numbers("loss", max(0, num_rows - window), num_rows))

    def validation_after(self, steps: int) -> float | None:
        """Return the loss of the last evaluation that is not later than after ``steps``."""
        return next(reversed(self._numbers("validation_loss", 0, bisect_right(self.steps, steps))), None)

    def tokens_per_second(self) -> float | None:
        """Return the tokens of all steps of all replicas, which make equally many steps, over their seconds."""
        seconds = sum(self._warm("step_seconds"))
        return sum(self._warm("tokens")) / seconds if seconds else None

    def step_seconds(self) -> float | None:
        seconds = self._warm("step_seconds")
        return median(seconds) if seconds else None

    def bytes_sent(self) -> float | None:
        """Return the mean bytes that the logging rank sends in a step, along all axes and to parameter servers."""
        rows = [row["comm"].values() for row in self.rows[self._warm_up :] if "comm" in row]
        pushed = _mean(self._warm("push_bytes"))
        if not rows and pushed is None:
            return None
        return (fmean(sum(axis["bytes"] for axis in axes) for axes in rows) if rows else 0.0) + (pushed or 0.0)

    def wait_seconds(self) -> float | None:
        """Return the mean seconds of a step that wait for peers or servers, None where nothing measures them."""
        return _mean(self._warm("peer_wait_seconds") or self._warm("server_wait_seconds"))

    def consensus_distance(self) -> float | None:
        """Return the last distance of the replicas from their average, relative to its norm."""
        return next(reversed(self._numbers("consensus_distance_relative", 0, len(self.rows))), None)

    def _warm(self, key: str) -> list[float]:
        """Return the values of a key in the rows after the warm-up."""
        return self._numbers(key, self._warm_up, len(self.rows))

    def _numbers(self, key: str, first: int, end: int) -> list[float]:
        return [number for at, number in self.numbers.get(key, {}).items() if first <= at < end]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


# -- the rows of the table --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mean:
    """The mean over the seeds, and the standard deviation where there are several."""

    mean: float
    deviation: float | None = None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Mean | None:
        """Return the mean of the runs' values; None where a run lacks its value."""
        runs = list(values)
        numbers = [value for value in runs if value is not None]
        if not numbers or len(numbers) < len(runs):
            return None
        return cls(fmean(numbers), float(np.std(numbers, ddof=1)) if len(numbers) > 1 else None)


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        problems: one line for each of its runs that is not done; then there are no numbers.
        means: ``loss`` (training) and ``validation_loss`` after equal steps, ``loss_at_time`` after equal time; of a
            step ``step_seconds``, ``tokens_per_second``, ``bytes_sent`` and ``wait_seconds`` of the logging rank, and
            ``consensus_distance``. None stands for a value that was not measured.
        loss_ratio: the validation loss over the first row's; without evaluations, the training loss.
        tokens_ratio: the speed over the first row's.
    """

    label: str
    problems: Sequence[str]
    means: Mapping[str, Mean | None]
    loss_ratio: float | None = None
    tokens_ratio: float | None = None


@dataclass(frozen=True)
class Comparison:
    """The whole table.

    Attributes:
        equal_steps: the number of steps that all finished runs have done.
        equal_seconds: the time in which the fastest of them did all of its steps.
    """

    rows: Sequence[Row]
    equal_steps: int
    equal_seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Return the table as JSON values; NaN and infinities become None."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)), parse_constant=lambda _: None)
        return plain


def compare(jobs: Sequence[Job], ended: Mapping[str, Ended]) -> Comparison:
    """Read the runs and return the table.

    Args:
        ended: name of a job -> its end; jobs that are not in it have not been run.
    """
    curves: dict[str, list[Curve]] = {}
    problems: dict[str, list[str]] = {}
    for job in jobs:
        mine, lines = curves.setdefault(job.label, []), problems.setdefault(job.label, [])
        how = ended.get(job.name, Ended("not run"))
        if how.state == "done":
            mine.append(Curve(job.folder / run_folder.METRICS))
        else:
            seed = "" if job.seed is None else f"seed {job.seed} "
            lines.append(f"{seed}{how.state}{how.reason and f': {how.reason}'}")
    every = [curve for label, mine in curves.items() if not problems[label] for curve in mine if curve.rows]
    steps = min((curve.steps[-1] for curve in every), default=0)
    seconds = min((curve.seconds[-1] for curve in every), default=0.0)
    measures: dict[str, Callable[[Curve], float | None]] = {
        "loss": lambda curve: curve.loss_after(steps),
        "validation_loss": lambda curve: curve.validation_after(steps),
        "loss_at_time": lambda curve: curve.loss_at(seconds),
        "step_seconds": Curve.step_seconds,
        "tokens_per_second": Curve.tokens_per_second,
        "bytes_sent": Curve.bytes_sent,
        "wait_seconds": Curve.wait_seconds,
        "consensus_distance": Curve.consensus_distance,
    }
    rows: list[Row] = []
    for label, mine in curves.items():
        means = {name: Mean.of(map(measure, mine)) for name, measure in measures.items()} if not problems[label] else {}
        first = rows[0].means if rows else means
        loss = "validation_loss" if first.get("validation_loss") else "loss"
        ratios = [_ratio(means.get(name), first.get(name)) for name in (loss, "tokens_per_second")]
        rows.append(Row(label, problems[label], means, *ratios))
    return Comparison(rows, steps, seconds)


def _ratio(value: Mean | None, first: Mean | None) -> float | None:
    return value.mean / first.mean if value is not None and first is not None and first.mean else None


# -- printing ---------------------------------------------------------------------------------------------


def print_table(comparison: Comparison, console: Console, counted: str = "tokens") -> None:
    """Print the rows, the problems, and the meaning of the columns; a row is one line, however narrow the terminal.

    Args:
        counted: the unit that the loss counts.
    """
    seconds = comparison.equal_seconds
    after = f"{seconds:.3g} s" if seconds < 100 else clock(seconds)
    columns = (
        "loss",
        "validation",
        f"loss after {after}",
        f"{counted}/s",
        "step",
        "sent/step",
        "waited/step",
        "distance",
    )
    if comparison.equal_steps:
        rows = [(row.label, *([] if row.problems else _cells(row))) for row in comparison.rows]
        print_rows(console, columns, rows)
    lines = [f"{row.label}: {line}" for row in comparison.rows for line in row.problems]
    if comparison.equal_steps:
        lines += [
            "",
            f"loss: training loss, the mean of the last 20th of {comparison.equal_steps} steps, and of the steps done "
            f"after {after}, the time in which the fastest run did all of its steps; validation: after the same steps",
            f"over seeds: means, with standard deviations in brackets; percent and x: loss (validation where there is "
            f"one) and speed, relative to {comparison.rows[0].label}",
        ]
    else:
        lines.append("no run has come to its end, so there are no numbers")
    print_lines(console, lines)


def _cells(row: Row) -> Iterator[str]:
    def shown(name: str, show: Callable[[float], str]) -> str:
        value = row.means[name]
        spread = f" ({show(value.deviation)})" if value and value.deviation and "loss" in name else ""
        return "-" if value is None else f"{show(value.mean)}{spread}"

    for name in ("loss", "validation_loss", "loss_at_time"):
        is_compared = row.loss_ratio and name == ("validation_loss" if row.means["validation_loss"] else "loss")
        percent = f" {100 * (row.loss_ratio - 1):+.1f} %" if row.loss_ratio and is_compared else ""
        yield shown(name, "{:.4f}".format) + percent
    faster = f" x{row.tokens_ratio:.2f}" if row.tokens_ratio else ""
    yield shown("tokens_per_second", "{:,.0f}".format) + faster
    yield shown("step_seconds", seconds_text)
    yield shown("bytes_sent", byte_count)
    yield shown("wait_seconds", seconds_text)
    yield shown("consensus_distance", "{:.2g}".format)
