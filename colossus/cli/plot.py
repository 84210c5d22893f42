"""``colossus plot``: the numbers of runs by step, tokens or time, in the terminal or as a picture."""

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
from colossus.chart import Bars, Panel, in_encoding, save_charts, text_chart
from colossus.cli.parser import Parser, path_argument, positive_integer
from colossus.cli.plot_panels import BARS, VIEWS, gaps, make_panels
from colossus.config import ConfigError
from colossus.launch import run_folder
from colossus.launch.run_metrics import RunMetrics
from colossus.picture import FORMATS

#: columns of a terminal from which on two charts stand beside each other; rows of a chart
_WIDE, _ROWS = 110, 16


def make_parser() -> Parser:
    parser = Parser(
        "colossus plot",
        "Draw what the rows of runs (metrics.jsonl) tell: loss and validation, gradient norm, learning rate, speed,\n"
        "memory, and what else they have. Several runs are drawn over each other, and a run may still be going on.",
        f"panels: {', '.join(VIEWS)},\n"
        f"  {', '.join(BARS)} (bytes by axis, with comm.accounting=True; time by part, of a profile), and any key\n"
        "  of the rows: rows_touched, experts.blocks.0.mlp.router.tokens, comm.*.calls (a line for each axis)\n"
        "\nexamples:\n"
        "  colossus plot gpt_stdlib\n"
        "  colossus plot runs/first runs/second --x tokens --smooth 20 --out loss.png\n"
        "  colossus plot runs/compare-gpt_stdlib-*/*/ --x time --panels loss,throughput\n",
    )
    parser.add_argument(
        "runs",
        type=path_argument,
        metavar="RUN",
        nargs="+",
        help="a run folder, a metrics.jsonl, or the name of a run (the newest of runs/NAME-*)",
    )
    parser.add_argument(
        "--x",
        choices=("step", "tokens", "time"),
        default="step",
        help="tokens: of all steps so far; time: of steps, without evaluations, checkpoints and pauses (default: step)",
    )
    parser.add_argument(
        "--smooth",
        type=positive_integer,
        default=1,
        metavar="N",
        help="draw means over N steps, and the numbers themselves faint behind them",
    )
    parser.add_argument("--panels", metavar="NAME,...", default="", help="which (default: all that have numbers)")
    parser.add_argument(
        "--out",
        type=path_argument,
        metavar="FILE",
        help=f"draw into this file instead ({', '.join(FORMATS)}); needs the extra colossus[plot]",
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    paths = {path.resolve(): path for path in map(metrics_of, arguments.runs)}
    metrics = dict(zip(short_names(list(paths)), map(RunMetrics, paths), strict=True))
    for path, each in zip(paths.values(), metrics.values(), strict=True):
        if not each.rows:
            raise ConfigError(f"{path} has no rows: no step has ended yet")
    names = [name for name in arguments.panels.split(",") if name]
    panels = make_panels(metrics, arguments.x, arguments.smooth, names)
    if arguments.out:
        try:
            save_charts(panels, Path(arguments.out))
        except (ValueError, OSError) as error:
            raise ConfigError(f"--out {error}") from error
    for (name, each), path in zip(metrics.items(), paths.values(), strict=True):
        print(f"{name}: {counted(len(each.rows), 'step')}, {path}")
    if arguments.out:
        print(f"drawn in {arguments.out}")
    else:
        print_charts(panels, shutil.get_terminal_size((100, 24)).columns)
    for line in gaps(panels):
        print(line)
    return 0


def metrics_of(given: str) -> Path:
    """The ``metrics.jsonl`` that is meant.

    Raises:
        ConfigError: when there is none.
    """
    path = Path(given)
    if path.is_file():
        return path
    if (path / run_folder.METRICS).is_file():
        return path / run_folder.METRICS
    if path.is_dir():
        hint = f"; there are runs in it: {path}/*/" if any(path.glob(f"*/{run_folder.METRICS}")) else ""
        raise ConfigError(f"{given}: no run folder: it has no {run_folder.METRICS}{hint}")
    runs = run_folder.of_name(given) if path.name == given else []
    found = next((run for run in runs if run_folder.has_metrics(run)), None)
    if found is None:
        named = f", and no run in runs/{given}-* has rows" if path.name == given else ""
        raise ConfigError(f"{given}: no such path{named}")
    return found / run_folder.METRICS


def short_names(paths: Sequence[Path]) -> list[str]:
    """What differs in the paths of runs' rows, cut at ``/`` and ``-``: ``sgp`` and ``d-psgd`` of ``runs/gpt-sgp`` and
    ``runs/gpt-d-psgd``. Of one run it is the name of its folder."""
    runs = [path.parent if path.name == run_folder.METRICS else path for path in paths]
    if len(runs) == 1:
        return [runs[0].name]
    words = [re.split("(?<=[/-])", str(run)) for run in runs]
    for end in (0, -1):
        while min(map(len, words)) > 1 and len({each[end] for each in words}) == 1:
            for each in words:
                each.pop(end)
    names = ["".join(each).rstrip("/-") for each in words]
    return names if len(set(names)) == len(names) else list(map(str, runs))


def print_charts(panels: Sequence[Panel | Bars], width: int) -> None:
    """Print charts, in a wide terminal two beside each other; in colours where it has them."""
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
