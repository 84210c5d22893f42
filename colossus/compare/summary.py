"""The table: what runs' ``metrics.jsonl`` say each strategy or plan reached after equal steps and after equal time, and
what a step of it costs. No torch."""

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

    state: Literal["done", "failed", "stopped", "not run"]
    reason: str = ""
    code: int = 0


class Curve(RunMetrics):
    """The rows of one run, and what they say after so many steps or seconds."""

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
        """That of the last evaluation not later than after ``steps``."""
        return next(reversed(self._numbers("validation_loss", 0, bisect_right(self.steps, steps))), None)

    def tokens_per_second(self) -> float | None:
        """Of all replicas, which make the same number of steps: tokens of all steps over their seconds."""
        seconds = sum(self._warm("step_seconds"))
        return sum(self._warm("tokens")) / seconds if seconds else None

    def step_seconds(self) -> float | None:
        found = self._warm("step_seconds")
        return median(found) if found else None

    def bytes_sent(self) -> float | None:
        """By the logging rank in a step, in the mean, along all axes and to parameter servers."""
        rows = [row["comm"].values() for row in self.rows[self._warm_up :] if "comm" in row]
        pushed = _mean(self._warm("push_bytes"))
        if not rows and pushed is None:
            return None
        return (fmean(sum(axis["bytes"] for axis in axes) for axes in rows) if rows else 0.0) + (pushed or 0.0)

    def wait_seconds(self) -> float | None:
        """For peers or servers, in a step, in the mean; None of strategies that do not measure it."""
        return _mean(self._warm("peer_wait_seconds") or self._warm("server_wait_seconds"))

    def consensus_distance(self) -> float | None:
        """Of the replicas from their average, relative to its norm; the last that was measured."""
        return next(reversed(self._numbers("consensus_distance_relative", 0, len(self.rows))), None)

    def _warm(self, key: str) -> list[float]:
        """What the rows behind the warm-up have of it."""
        return self._numbers(key, self._warm_up, len(self.rows))

    def _numbers(self, key: str, first: int, end: int) -> list[float]:
        return [number for at, number in self.numbers.get(key, {}).items() if first <= at < end]


def _mean(found: Sequence[float]) -> float | None:
    return fmean(found) if found else None


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
        return cls(fmean(known), float(np.std(known, ddof=1)) if len(known) > 1 else None)


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        problems: one line for each of its runs that is not done; then there are no numbers.
        means: ``loss`` (training) and ``validation_loss`` after equal steps, ``loss_at_time`` after equal time, and of
            a step: ``step_seconds``, ``tokens_per_second``, ``bytes_sent`` and ``wait_seconds`` of the logging rank,
            ``consensus_distance``. None of what was not measured.
        loss_ratio: of the validation loss to the first row's; of the training loss where nothing was evaluated.
        tokens_ratio: of the speed to the first row's.
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
        equal_steps: the steps that all finished runs have done.
        equal_seconds: the time that the fastest of them took for all of its steps.
    """

    rows: Sequence[Row]
    equal_steps: int
    equal_seconds: float

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; numbers that are none are None."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)), parse_constant=lambda _: None)
        return plain


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


# -- as it is printed -------------------------------------------------------------------------------------


def print_table(comparison: Comparison, console: Console, counted: str = "tokens") -> None:
    """Print the rows, what did not run, and what the columns are; a row is one line, however narrow the terminal.

    Args:
        counted: what the loss counts.
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
            f"loss: training, the mean of the last 20th of {comparison.equal_steps} steps, and of those done after "
            f"{after} of steps, which the fastest run took for all of its own; validation: after the same steps",
            f"over seeds: means, in brackets standard deviations; percent and x: loss (validation where there is one) "
            f"and speed, to those of {comparison.rows[0].label}",
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
