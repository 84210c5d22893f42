"""The metrics of runs as panels of a chart. No torch."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from colossus.chart import Line, Panel
from colossus.chart.panel import readable
from colossus.config import ConfigError
from colossus.launch.run_metrics import RunMetrics
from colossus.registry import nearest

#: prefix of the keys of evaluations (after the name of an average: ``ema.``), whose numbers are drawn as markers
EVALUATED = "validation_"


@dataclass(frozen=True)
class View:
    """A panel: keys of the rows, and how their numbers are drawn.

    Attributes:
        title: title of the panel.
        keys: key of the rows, or pattern of keys -> label of its line, after the name of the run; the text that a ``*``
            matches is added. ``experts.blocks.0.tokens`` is the entry ``tokens`` of the entry ``blocks.0`` of
            ``experts``; a list has a line for each of its numbers.
        unit: label of the y axis.
        scale: factor from the numbers of the rows to ``unit``.
        log_y: whether the y axis is logarithmic.
        is_smoothed: whether ``--smooth`` applies.
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
    "comm": View("sent by the first rank in a step", {"comm.*.bytes": ""}, "bytes", log_y=True, is_smoothed=False),
}
#: units of time: seconds, name
_UNITS = ((3600, "hours"), (60, "minutes"), (1, "seconds"))


def make_panels(
    metrics: Mapping[str, RunMetrics], x: str = "step", smooth: int = 1, names: Sequence[str] = ()
) -> list[Panel]:
    """Return a panel for each name.

    Args:
        metrics: metrics of each run by its name; each has rows.
        x: ``step``, ``tokens`` (of all steps so far) or ``time`` (see `RunMetrics.seconds`).
        smooth: number of steps over which a line shows the mean, with the numbers themselves faint behind it.
        names: names of `VIEWS`, keys of the rows and patterns of keys; by default all panels with numbers.

    Raises:
        ConfigError: no run has numbers for a name, or for any panel if there are no names.
    """
    x_label, places = _places(metrics, x)
    keys = list(dict.fromkeys(key for run in metrics.values() for key in run.numbers))
    evaluated = [key for key in keys if key.startswith(EVALUATED) and key not in _LOSSES]
    panels: list[Panel] = []
    for name in names or dict.fromkeys(["loss", *evaluated, *VIEWS]):
        patterns = [name, *([f"*.{name}"] if name in evaluated else [])]
        view = VIEWS.get(name, View(name, dict.fromkeys(patterns, "")))
        panel = _panel(view, metrics, places, keys, smooth, x_label)
        if panel is not None:
            panels.append(panel)
        elif names:
            raise ConfigError(_unknown(name, keys))
    if not panels:
        raise ConfigError(f"the rows have no numbers for any panel; --panels draws one of these: {', '.join(keys)}")
    return panels


def _unknown(name: str, keys: Sequence[str]) -> str:
    if name == "comm":
        return "--panels comm: no run has it; comm.accounting=True counts bytes"
    close = nearest(name, [*VIEWS, *keys])
    hint = f"; did you mean {close}?" if close else ""
    patterns = dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", key) for key in keys)
    lists = f"  panels: {', '.join(VIEWS)}\n  keys: {', '.join(patterns)}"
    return f"--panels {name}: the rows have no such numbers{hint}\n{lists}"


def _places(metrics: Mapping[str, RunMetrics], x: str) -> tuple[str, dict[str, list[float]]]:
    """Return the label of the x axis, and the x of each row by run."""
    if x == "step":
        return "step", {name: list(map(float, run.steps)) for name, run in metrics.items()}
    if x == "tokens":
        return "tokens", {name: run.tokens for name, run in metrics.items()}
    longest = max(run.seconds[-1] for run in metrics.values())
    unit, label = next((unit, label) for unit, label in _UNITS if longest >= 3 * unit or unit == 1)
    return f"{label} in steps", {name: [at / unit for at in run.seconds] for name, run in metrics.items()}


# -- lines ----------------------------------------------------------------------------------------------------------


def _panel(
    view: View,
    runs: Mapping[str, RunMetrics],
    places: Mapping[str, Sequence[float]],
    keys: Sequence[str],
    smooth: int,
    x_label: str,
) -> Panel | None:
    """Return the panel of a view, None if no run has numbers for it."""
    labels = {
        key: " ".join(filter(None, (label, part)))
        for pattern, label in view.keys.items()
        for key, part in _matching(pattern, keys).items()
    }
    # The validation loss has the colour of the loss, and the first line of a run has one colour in all panels.
    owners = {key: key.removeprefix(EVALUATED) if key.removeprefix(EVALUATED) in labels else key for key in labels}
    colours = list(dict.fromkeys(owners.values()))
    lines: list[Line] = []
    for at, (name, run) in enumerate(runs.items()):
        for key in filter(run.numbers.__contains__, labels):
            colour = colours.index(owners[key]) * len(runs) + at
            is_evaluated = key.rpartition(".")[2].startswith(EVALUATED)
            rows = list(run.numbers[key])
            x, y = [places[name][row] for row in rows], [number * view.scale for number in run.numbers[key].values()]
            if view.is_smoothed and smooth > 1 and not is_evaluated:
                lines.append(Line("", x, y, "faint", colour))
                y = moving_mean([run.steps[row] for row in rows], y, smooth)
            label = _line_name(name, key, labels[key], len(runs), len(labels))
            lines.append(Line(label, x, y, "markers" if is_evaluated else "line", colour))
    return Panel(view.title, lines, x_label, view.unit, view.log_y) if lines else None


def _matching(pattern: str, keys: Sequence[str]) -> dict[str, str]:
    """Return the keys that a pattern matches, each with the parts that the pattern leaves open, ``*`` and a suffix."""
    wanted = re.compile(re.escape(pattern).replace(r"\*", "(.*)") + r"(?:\.(.+))?")
    matches = ((key, wanted.fullmatch(key)) for key in keys)
    return {key: " ".join(filter(None, match.groups())) for key, match in matches if match is not None}


def _line_name(run: str, key: str, label: str, num_runs: int, num_keys: int) -> str:
    """Return the label of a line; it is empty if the panel has no other line."""
    if num_runs > 1:
        return f"{run} {label}".rstrip()
    return label or key if num_keys > 1 else ""


def moving_mean(steps: Sequence[int], values: Sequence[float], window: int) -> list[float]:
    """Return for each step the mean of the finite values of the ``window`` steps around it.

    A step whose own value is not finite gets NaN.
    """
    means = []
    for step, value in zip(steps, values, strict=True):
        first, end = (bisect_right(steps, step + side) for side in (window // 2 - window, window // 2))
        finite = [near for near in values[first:end] if math.isfinite(near)]
        means.append(fmean(finite) if math.isfinite(value) else math.nan)
    return means


def gaps(panels: Sequence[Panel]) -> list[str]:
    """Return a sentence for each line that has numbers that cannot be drawn."""
    sentences = []
    for panel in panels:
        for line in panel.lines:
            missing = [x for x, y in zip(line.x, panel.heights(line), strict=True) if math.isnan(y)]
            if missing and line.style != "faint":
                name = f"{panel.title}{line.label and f', {line.label}'}"
                values = "NaN, infinite or not above zero" if panel.log_y else "NaN or infinite"
                where = f"first at {panel.x_label} {readable(missing[0])}"
                sentences.append(f"{name}: {len(missing)} of {len(line.x)} numbers are {values} ({where}): gaps")
    return sentences
