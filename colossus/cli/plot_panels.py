"""What the rows of runs tell, as panels of a chart. No torch."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from colossus.chart import Bars, Line, Panel
from colossus.config import ConfigError
from colossus.launch.run_metrics import RunMetrics
from colossus.registry import nearest

#: a key of the rows that only evaluations write starts so; such numbers are drawn as markers
EVALUATED = "validation_"


@dataclass(frozen=True)
class View:
    """What one panel shows.

    Attributes:
        keys: what a line is called behind its run's name -> a key of the rows, or a pattern of keys, whose ``*`` are
            then part of the name. ``experts.blocks.0.tokens`` is ``tokens`` in what ``experts`` holds of
            ``blocks.0``, and a list has a line for each of its numbers.
        scale: numbers of the rows times this are of the ``unit``.
        is_smoothed: whether smoothing tells more than the numbers do.
    """

    title: str
    keys: Mapping[str, str]
    unit: str = ""
    scale: float = 1.0
    log_y: bool = False
    is_smoothed: bool = True


VIEWS = {
    "loss": View("loss", {"": "loss", "validation": "validation_loss"}),
    "grad_norm": View("gradient norm", {"": "grad_norm"}, log_y=True),
    "lr": View("learning rate", {"": "lr"}, is_smoothed=False),
    "throughput": View("tokens per second", {"": "tokens_per_second"}),
    "step_seconds": View("seconds of a step", {"": "step_seconds"}, log_y=True),
    "memory": View("memory", {"": "memory_bytes", "reserved": "memory_reserved_bytes"}, "GB", 1e-9, is_smoothed=False),
    "mfu": View("model FLOP utilisation", {"": "mfu"}),
    "consensus": View("relative distance of the replicas", {"": "consensus_distance_relative"}, log_y=True),
    "experts": View("tokens of the busiest expert over the mean", {"": "experts.*.max_over_mean"}),
    "entropy": View("entropy of the routers' scores", {"": "experts.*.entropy"}),
}
#: the panel of bars: bytes that the first rank sends in a step, by axis
COMM = "comm"
#: of time: seconds in it, its name
_UNITS = ((3600, "hours"), (60, "minutes"), (1, "seconds"))


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: in legends.
        x: where each row stands on the x axis.
    """

    name: str
    metrics: RunMetrics
    x: Sequence[float]

    @cached_property
    def numbers(self) -> dict[str, dict[int, float]]:
        """key -> number of a row -> its number; keys in keys are joined by points."""
        found: dict[str, dict[int, float]] = {}
        for at, row in enumerate(self.metrics.rows):
            for key, number in _flat(row):
                found.setdefault(key, {})[at] = number
        return found


def _flat(row: Mapping[Any, Any], before: str = "") -> Iterator[tuple[str, float]]:
    for key, value in row.items():
        if isinstance(value, Mapping | list):
            yield from _flat(value if isinstance(value, Mapping) else dict(enumerate(value)), f"{before}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{before}{key}", float(value)


def make_panels(
    metrics: Mapping[str, RunMetrics], x: str = "step", smooth: int = 1, names: Sequence[str] = ()
) -> tuple[list[Panel | Bars], list[str]]:
    """A panel for each of the names.

    Args:
        metrics: name of a run -> its rows, of which there are some.
        x: ``step``, ``tokens`` (of all steps so far) or ``time`` (see `RunMetrics.seconds`).
        smooth: a line shows the mean over this many steps, and faint behind it the numbers themselves.
        names: of `VIEWS`, ``comm``, or keys and patterns of the rows; by default all of which there are numbers.

    Returns:
        The panels, and sentences about numbers that are not finite.

    Raises:
        ConfigError: for a name of which no run has numbers.
    """
    x_label, places = _places(metrics, x)
    runs = [Run(name, each, places[name]) for name, each in metrics.items()]
    keys = list(dict.fromkeys(key for run in runs for key in run.numbers))
    evaluated = [key for key in keys if key.startswith(EVALUATED) and key != "validation_loss"]
    panels: list[Panel | Bars] = []
    notes: list[str] = []
    for name in names or dict.fromkeys(["loss", *evaluated, *VIEWS, COMM]):
        panel: Panel | Bars | None
        if name == COMM:
            panel = _bytes_by_axis(runs)
        else:
            panel = _panel(VIEWS.get(name, View(name, {"": name})), runs, keys, smooth, x_label, notes)
        if panel is not None:
            panels.append(panel)
        elif names:
            raise ConfigError(_unknown(name, keys))
    return panels, list(dict.fromkeys(notes))


def _places(metrics: Mapping[str, RunMetrics], x: str) -> tuple[str, dict[str, list[float]]]:
    """The label of the x axis, and where the rows of each run stand on it."""
    if x == "step":
        return "step", {name: list(map(float, each.steps)) for name, each in metrics.items()}
    if x == "tokens":
        return "tokens", {name: each.tokens for name, each in metrics.items()}
    longest = max(each.seconds[-1] for each in metrics.values())
    unit, label = next(each for each in _UNITS if longest >= 3 * each[0] or each[0] == 1)
    return f"{label} in steps", {name: [at / unit for at in each.seconds] for name, each in metrics.items()}


def _matching(pattern: str, keys: Sequence[str]) -> dict[str, str]:
    """key -> what of it stands for the ``*`` of the pattern, or behind the pattern's end."""
    wanted = re.compile(re.escape(pattern).replace(r"\*", "(.*)") + r"(?:\.(.+))?")
    found = ((key, wanted.fullmatch(key)) for key in keys)
    return {key: " ".join(filter(None, match.groups())) for key, match in found if match is not None}


def _panel(
    view: View, runs: Sequence[Run], keys: Sequence[str], smooth: int, x_label: str, notes: list[str]
) -> Panel | None:
    """The panel of a view; None where no run has numbers of it."""
    found = [
        (key, " ".join(filter(None, (label, part))))
        for label, pattern in view.keys.items()
        for key, part in _matching(pattern, keys).items()
    ]
    # a run's evaluations have the colour of its first line
    per_run = max(1, sum(not key.startswith(EVALUATED) for key, _ in found))
    lines: list[Line] = []
    for at, run in enumerate(runs):
        colour = at * per_run
        for key, label in found:
            numbers = run.numbers.get(key, {})
            name, rows = (label if label and len(runs) == 1 else f"{run.name} {label}".rstrip()), list(numbers)
            x, y = [run.x[row] for row in rows], [numbers[row] * view.scale for row in rows]
            notes += _not_finite(run, key)
            if key.startswith(EVALUATED):
                lines += [Line(name, x, y, "markers", at * per_run)] * bool(numbers)
                continue
            if numbers and smooth > 1 and view.is_smoothed:
                lines.append(Line("", x, y, "faint", colour))
                y = moving_mean([run.metrics.steps[row] for row in rows], y, smooth)
            lines += [Line(name, x, y, colour=colour)] * bool(numbers)
            colour += 1
    return Panel(view.title, lines, x_label, view.unit, view.log_y) if lines else None


def moving_mean(steps: Sequence[int], values: Sequence[float], window: int) -> list[float]:
    """At each step the mean of the finite values of the ``window`` steps around it; NaN where its own is not finite."""
    means = []
    for step, value in zip(steps, values, strict=True):
        first, end = (bisect_right(steps, step + side) for side in (window // 2 - window, window // 2))
        finite = [each for each in values[first:end] if math.isfinite(each)]
        means.append(fmean(finite) if math.isfinite(value) else math.nan)
    return means


def _not_finite(run: Run, key: str) -> list[str]:
    numbers = run.numbers.get(key, {})
    rows = [row for row, number in numbers.items() if not math.isfinite(number)]
    if not rows:
        return []
    first = f"first at step {run.metrics.steps[rows[0]]}"
    return [f"{run.name}: {key} is NaN or infinite in {len(rows)} of {len(numbers)} rows, {first}: gaps"]


def _bytes_by_axis(runs: Sequence[Run]) -> Bars | None:
    """Bytes that the logging rank sends in a step, in the mean over the rows that tell it."""
    means: dict[str, dict[str, float]] = {}
    for run in runs:
        rows = [row[COMM] for row in run.metrics.rows if COMM in row]
        axes = dict.fromkeys(axis for row in rows for axis in row)
        if rows:
            means[run.name] = {axis: fmean(row.get(axis, {}).get("bytes", 0) for row in rows) for axis in axes}
    axes = dict.fromkeys(axis for each in means.values() for axis in each)
    parts = {axis: [each.get(axis, 0.0) for each in means.values()] for axis in axes}
    return Bars("sent by the first rank in a step", list(means), parts, "bytes") if means else None


def _unknown(name: str, keys: Sequence[str]) -> str:
    if name == COMM:
        return f"--panels {name}: no run has counted bytes; comm.accounting=True does"
    close = nearest(name, [*VIEWS, COMM, *keys])
    hint = f"; did you mean {close}?" if close else ""
    patterns = dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", key) for key in keys)
    lists = f"  panels: {', '.join([*VIEWS, COMM])}\n  keys: {', '.join(patterns)}"
    return f"--panels {name}: the rows have no such numbers{hint}\n{lists}"
