"""What the rows of runs tell, as panels of a chart. No torch."""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from colossus.chart import Bars, Line, Panel
from colossus.chart.panel import readable
from colossus.config import ConfigError
from colossus.launch import run_folder
from colossus.launch.run_metrics import RunMetrics
from colossus.registry import nearest

#: keys of what evaluations write begin so, behind the name of an average (``ema.``); such numbers are drawn as markers
EVALUATED = "validation_"


@dataclass(frozen=True)
class View:
    """What one panel shows.

    Attributes:
        keys: a key of the rows, or a pattern of keys -> what its line is called behind its run's name; what stands for
            the ``*`` of a pattern is part of the name. ``experts.blocks.0.tokens`` is ``tokens`` in what ``experts``
            holds of ``blocks.0``; a list has a line for each of its numbers.
        scale: numbers of the rows times this are of the ``unit``.
        is_smoothed: whether means over steps tell more than the numbers do.
    """

    title: str
    keys: Mapping[str, str]
    unit: str = ""
    scale: float = 1.0
    log_y: bool = False
    is_smoothed: bool = True


_LOSSES = {"loss": "", "validation_loss": "validation", "*.validation_loss": "validation"}
_MEMORY = {"memory_bytes": "", "memory_reserved_bytes": "reserved"}
VIEWS = {
    "loss": View("loss", _LOSSES),
    "grad_norm": View("gradient norm", {"grad_norm": ""}, log_y=True),
    "lr": View("learning rate", {"lr": ""}, is_smoothed=False),
    "throughput": View("tokens per second", {"tokens_per_second": ""}),
    "step_seconds": View("seconds of a step", {"step_seconds": ""}, log_y=True),
    "memory": View("memory", _MEMORY, "GB", 1e-9, is_smoothed=False),
    "mfu": View("model FLOP utilisation", {"mfu": ""}),
    "consensus": View("relative distance of the replicas", {"consensus_distance_relative": ""}, log_y=True),
    "experts": View("tokens of the busiest expert over the mean", {"experts.*.max_over_mean": ""}),
    "entropy": View("entropy of the routers' scores", {"experts.*.entropy": ""}),
}
#: of time: seconds in it, its name
_UNITS = ((3600, "hours"), (60, "minutes"), (1, "seconds"))


def make_panels(
    metrics: Mapping[str, RunMetrics], x: str = "step", smooth: int = 1, names: Sequence[str] = ()
) -> list[Panel | Bars]:
    """A panel for each of the names.

    Args:
        metrics: name of a run -> its rows, of which there are some.
        x: ``step``, ``tokens`` (of all steps so far) or ``time`` (see `RunMetrics.seconds`).
        smooth: a line shows the mean over this many steps, and faint behind it the numbers themselves.
        names: of `VIEWS`, of `BARS`, or keys and patterns of the rows; by default all of which there are numbers.

    Raises:
        ConfigError: for a name of which no run has numbers, and where none are named and none are there.
    """
    x_label, places = _places(metrics, x)
    keys = list(dict.fromkeys(key for run in metrics.values() for key in run.numbers))
    evaluated = [key for key in keys if key.startswith(EVALUATED) and key not in _LOSSES]
    panels: list[Panel | Bars] = []
    for name in names or dict.fromkeys(["loss", *evaluated, *VIEWS, *BARS]):
        panel: Panel | Bars | None
        if name in BARS:
            panel = BARS[name](metrics)
        else:
            patterns = [name, *([f"*.{name}"] if name in evaluated else [])]
            view = VIEWS.get(name, View(name, dict.fromkeys(patterns, "")))
            panel = _panel(view, metrics, places, keys, smooth, x_label)
        if panel is not None:
            panels.append(panel)
        elif names:
            raise ConfigError(_unknown(name, keys))
    if not panels:
        raise ConfigError(f"the rows have no numbers of any panel; choose some by --panels: {', '.join(keys)}")
    return panels


def _unknown(name: str, keys: Sequence[str]) -> str:
    sources = {"comm": "comm.accounting=True counts bytes", "profile": "train.profile and colossus profile make one"}
    if name in sources:
        return f"--panels {name}: no run has it; {sources[name]}"
    close = nearest(name, [*VIEWS, *BARS, *keys])
    hint = f"; did you mean {close}?" if close else ""
    patterns = dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", key) for key in keys)
    lists = f"  panels: {', '.join([*VIEWS, *BARS])}\n  keys: {', '.join(patterns)}"
    return f"--panels {name}: the rows have no such numbers{hint}\n{lists}"


def _places(metrics: Mapping[str, RunMetrics], x: str) -> tuple[str, dict[str, list[float]]]:
    """The label of the x axis, and where the rows of each run stand on it."""
    if x == "step":
        return "step", {name: list(map(float, each.steps)) for name, each in metrics.items()}
    if x == "tokens":
        return "tokens", {name: each.tokens for name, each in metrics.items()}
    longest = max(each.seconds[-1] for each in metrics.values())
    unit, label = next(each for each in _UNITS if longest >= 3 * each[0] or each[0] == 1)
    return f"{label} in steps", {name: [at / unit for at in each.seconds] for name, each in metrics.items()}


# -- lines ----------------------------------------------------------------------------------------------------------


def _panel(
    view: View,
    runs: Mapping[str, RunMetrics],
    places: Mapping[str, Sequence[float]],
    keys: Sequence[str],
    smooth: int,
    x_label: str,
) -> Panel | None:
    """The panel of a view; None where no run has numbers of it."""
    labels = {
        key: " ".join(filter(None, (label, part)))
        for pattern, label in view.keys.items()
        for key, part in _matching(pattern, keys).items()
    }
    # the validation loss has the colour of the loss, and the first line of a run the same one in all panels
    owners = {key: key.removeprefix(EVALUATED) if key.removeprefix(EVALUATED) in labels else key for key in labels}
    colours = list(dict.fromkeys(owners.values()))
    lines: list[Line] = []
    for at, (name, run) in enumerate(runs.items()):
        for key in filter(run.numbers.__contains__, labels):
            colour, is_evaluated = colours.index(owners[key]) * len(runs) + at, _is_evaluated(key)
            rows = list(run.numbers[key])
            x, y = [places[name][row] for row in rows], [number * view.scale for number in run.numbers[key].values()]
            if view.is_smoothed and smooth > 1 and not is_evaluated:
                lines.append(Line("", x, y, "faint", colour))
                y = moving_mean([run.steps[row] for row in rows], y, smooth)
            label = _line_name(name, key, labels[key], len(runs), len(labels))
            lines.append(Line(label, x, y, "markers" if is_evaluated else "line", colour))
    return Panel(view.title, lines, x_label, view.unit, view.log_y) if lines else None


def _is_evaluated(key: str) -> bool:
    return key.rpartition(".")[2].startswith(EVALUATED)


def _matching(pattern: str, keys: Sequence[str]) -> dict[str, str]:
    """key -> what of it stands for the ``*`` of the pattern, or behind the pattern's end."""
    wanted = re.compile(re.escape(pattern).replace(r"\*", "(.*)") + r"(?:\.(.+))?")
    found = ((key, wanted.fullmatch(key)) for key in keys)
    return {key: " ".join(filter(None, match.groups())) for key, match in found if match is not None}


def _line_name(run: str, key: str, label: str, num_runs: int, num_keys: int) -> str:
    """What tells the line from the others of its panel: nothing where it is the only one."""
    if num_runs > 1:
        return f"{run} {label}".rstrip()
    return label or key if num_keys > 1 else ""


def moving_mean(steps: Sequence[int], values: Sequence[float], window: int) -> list[float]:
    """At each step the mean of the finite values of the ``window`` steps around it; NaN where its own is not finite."""
    means = []
    for step, value in zip(steps, values, strict=True):
        first, end = (bisect_right(steps, step + side) for side in (window // 2 - window, window // 2))
        finite = [each for each in values[first:end] if math.isfinite(each)]
        means.append(fmean(finite) if math.isfinite(value) else math.nan)
    return means


def gaps(panels: Sequence[Panel | Bars]) -> list[str]:
    """A sentence for each line with numbers that cannot be drawn."""
    found = []
    for panel in panels:
        if isinstance(panel, Bars):
            continue
        for line in panel.lines:
            missing = [x for x, y in zip(line.x, panel.heights(line), strict=True) if math.isnan(y)]
            if missing and line.style != "faint":
                name = f"{panel.title}{line.label and f', {line.label}'}"
                what = "NaN, infinite or not above zero" if panel.log_y else "NaN or infinite"
                where = f"first at {panel.x_label} {readable(missing[0])}"
                found.append(f"{name}: {len(missing)} of {len(line.x)} numbers are {what} ({where}): gaps")
    return found


# -- bars -----------------------------------------------------------------------------------------------------------


def _bytes_by_axis(runs: Mapping[str, RunMetrics]) -> Bars | None:
    """Bytes that the logging rank sends in a step, in the mean over the rows that tell it; None where none does."""
    means: dict[str, dict[str, float]] = {}
    for name, run in runs.items():
        rows = [row["comm"] for row in run.rows if "comm" in row]
        axes = dict.fromkeys(axis for row in rows for axis in row)
        if rows:
            means[name] = {axis: fmean(row.get(axis, {}).get("bytes", 0) for row in rows) for axis in axes}
    return _bars("sent by the first rank in a step", means, "bytes")


def _time_by_part(runs: Mapping[str, RunMetrics]) -> Bars | None:
    """Where the time of a step goes, in the mean over ranks, by the profiles of runs; None where none has one."""
    means: dict[str, dict[str, float]] = {}
    for name, run in runs.items():
        path = run.path.parent / run_folder.PROFILE
        if path.is_file():
            profile = json.loads(path.read_bytes())
            ranks = [rank["seconds"] for rank in profile["ranks"]]
            means[name] = {part: 1e3 * fmean(rank.get(part, 0.0) for rank in ranks) for part in profile["parts"]}
    return _bars("time of a step, mean of ranks", means, "ms")


def _bars(title: str, sizes: Mapping[str, Mapping[str, float]], unit: str) -> Bars | None:
    """A bar of each run, with its parts."""
    names = dict.fromkeys(name for each in sizes.values() for name in each)
    parts = {name: [each.get(name, 0.0) for each in sizes.values()] for name in names}
    return Bars(title, list(sizes), parts, unit) if sizes else None


BARS = {"comm": _bytes_by_axis, "profile": _time_by_part}
