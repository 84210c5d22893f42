"""``colossus plot``: draw the numbers of runs by step, tokens or time, in the terminal or as a picture."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from colossus.arithmetic import counted
from colossus.chart import Panel, in_encoding, save_charts, text_chart
from colossus.cli.parser import Parser
from colossus.cli.plot_panels import VIEWS, gaps, make_panels
from colossus.config import ConfigError
from colossus.launch import run_folder
from colossus.launch.run_metrics import RunMetrics
from colossus.picture import FORMATS

#: the fewest columns of a terminal for two charts side by side; rows of a chart
_WIDE, _ROWS = 110, 16


def make_parser() -> Parser:
    parser = Parser(
        "colossus plot",
        "Draw the metrics of runs (metrics.jsonl): loss and validation, gradient norm, learning rate, speed, memory,\n"
        "and others. Several runs share the charts. A run may still be in progress.",
        f"panels: {', '.join(VIEWS)}\n"
        "  (comm: bytes by axis, with comm.accounting=True), and any key of the rows: rows_touched, comm.*.calls (a\n"
        "  line for each axis), experts.blocks.0.mlp.router.tokens\n"
        "\nexamples:\n"
        "  colossus plot gpt_stdlib\n"
        "  colossus plot runs/first runs/second --x tokens --smooth 20 --out loss.png\n"
        "  colossus plot runs/compare-gpt_stdlib-*/*/ --x time --panels loss,throughput\n",
    )
    help_text = "a run folder, a metrics.jsonl, or the name of a run (the newest of runs/NAME-*)"
    parser.add_path("runs", "RUN", help_text, nargs="+")
    help_text = "x axis: steps, tokens so far, or time, without evaluations, checkpoints and pauses (default: step)"
    parser.add_argument("--x", choices=("step", "tokens", "time"), default="step", help=help_text)
    parser.add_count("--smooth", "draw means over N steps; a picture shows the numbers themselves faint behind them", 1)
    parser.add_argument("--panels", metavar="NAME,...", default="", help="panels to draw (default: all with numbers)")
    help_text = f"draw into this file, not the terminal ({', '.join(FORMATS)}); needs the extra colossus[plot]"
    parser.add_path("--out", "FILE", help_text)
    return parser


def run(arguments: argparse.Namespace) -> int:
    paths = {path.resolve(): path for path in map(metrics_of, arguments.runs)}
    metrics = dict(zip(short_names(list(paths)), map(RunMetrics, paths), strict=True))
    for path, run_metrics in zip(paths.values(), metrics.values(), strict=True):
        if not run_metrics.rows:
            raise ConfigError(f"{path} has no rows: no step has ended yet")
    names = [name for name in arguments.panels.split(",") if name]
    panels = make_panels(metrics, arguments.x, arguments.smooth, names)
    if arguments.out:
        try:
            save_charts(panels, Path(arguments.out))
        except (ValueError, OSError) as error:
            raise ConfigError(f"--out {error}") from error
    for (name, run_metrics), path in zip(metrics.items(), paths.values(), strict=True):
        print(f"{name}: {counted(len(run_metrics.rows), 'step')}, {path}")
    if arguments.out:
        print(f"drawn in {arguments.out}")
    else:
        print_charts(panels, shutil.get_terminal_size((100, 24)).columns)
    for line in gaps(panels):
        print(line)
    return 0


def metrics_of(name: str) -> Path:
    """Return the ``metrics.jsonl`` of a run.

    Args:
        name: that file, a run folder, or the name of a run (the newest run with metrics).

    Raises:
        ConfigError: there is none.
    """
    path = Path(name)
    if path.is_file():
        return path
    if (path / run_folder.METRICS).is_file():
        return path / run_folder.METRICS
    if path.is_dir():
        hint = f"; there are runs in it: {path}/*/" if any(path.glob(f"*/{run_folder.METRICS}")) else ""
        raise ConfigError(f"{name} is no run folder: it has no {run_folder.METRICS}{hint}")
    runs = run_folder.of_name(name) if path.name == name else []
    folder = next((run for run in runs if run_folder.has_metrics(run)), None)
    if folder is None:
        nor_run = f", and no run in runs/{name}-* has rows" if path.name == name else ""
        raise ConfigError(f"{name}: no such path{nor_run}")
    return folder / run_folder.METRICS


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return the part of each run's path that differs from the others, or the folder's name of a single run.

    Paths are cut at ``/`` and ``-``: ``runs/gpt-sgp`` and ``runs/gpt-d-psgd`` become ``sgp`` and ``d-psgd``. If names
    would be equal, the whole paths are returned.
    """
    runs = [path.parent if path.name == run_folder.METRICS else path for path in paths]
    if len(runs) == 1:
        return [runs[0].name]
    words = [re.split("(?<=[/-])", str(run)) for run in runs]
    for end in (0, -1):
        while min(map(len, words)) > 1 and len({path_words[end] for path_words in words}) == 1:
            for path_words in words:
                path_words.pop(end)
    names = ["".join(path_words).rstrip("/-") for path_words in words]
    return names if len(set(names)) == len(names) else list(map(str, runs))


def print_charts(panels: Sequence[Panel], width: int) -> None:
    """Print charts, side by side if the terminal is wide, in colours if it has them."""
    console = Console(width=width, highlight=False)
    has_colours = console.color_system is not None and not console.no_color
    beside = 2 if width >= _WIDE and len(panels) > 1 else 1
    grid = Table.grid(padding=(1, 2, 0, 0))
    charts = [text_chart(panel, (width - 2) // beside - 2, _ROWS, colour=has_colours) for panel in panels]
    for first in range(0, len(charts), beside):
        grid.add_row(*(Text.from_ansi(chart, no_wrap=True) for chart in charts[first : first + beside]))
    with console.capture() as drawn:
        console.print(grid)
    print(in_encoding("\n".join(line.rstrip() for line in drawn.get().splitlines()), sys.stdout.encoding))
