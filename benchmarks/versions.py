"""The time of a train step before and after a change: cases of two checkouts, in the same alternating blocks.

    git worktree add ../before HEAD~20
    python -m benchmarks.versions ../before --cases zero-redundancy-2 colossus-zero1-2 --hidden 512

Each checkout runs its own code in ranks of its own, which wait while those of the other work: a drift of the machine
falls on both. A case of the older checkout is one that it has (`python -m benchmarks.train_step --help` there).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import common

_HERE = Path(__file__).resolve().parents[1]
_READY = "ready"


class Server:
    """The ranks of a case of a checkout, in processes that answer with the seconds of blocks.

    Raises:
        SystemExit: they have ended; their error is on standard error.
    """

    def __init__(self, checkout: Path, case: str, hidden: int) -> None:
        self._name = f"{case} of {checkout}"
        line = [sys.executable, str(Path(__file__).resolve()), "--serve", case, "--hidden", str(hidden)]
        self._process = subprocess.Popen(
            line, cwd=checkout, env={**os.environ, "PYTHONPATH": str(checkout)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._answer()

    def seconds(self, steps: int) -> float:
        """Return the seconds of a step of the slowest rank."""
        assert self._process.stdin is not None
        print(steps, file=self._process.stdin, flush=True)
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"{self._name} ended with exit code {self._process.wait()}")
        return line

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(case: str, hidden: int) -> None:
    """Answer each line of standard input, a number of steps, with the seconds of a step."""
    from functools import partial  # and from the other checkout, in this process alone:

    from benchmarks.cases import KINDS
    from benchmarks.ranks import RankGroup
    from benchmarks.train_step import SMOKE, Worker, sizes

    if case not in KINDS:
        raise SystemExit(f"this checkout has no case {case!r}: choose from {', '.join(KINDS)}")
    kind, workload = KINDS[case], sizes(hidden) if hidden else SMOKE
    kind.load()
    with RankGroup(case, kind.world, partial(Worker, kind, workload)) as group:
        print(_READY, flush=True)
        for line in sys.stdin:
            print(max(group.call("block", int(line))), flush=True)  # older groups have no `slowest`


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.make_parser(__doc__, blocks=15)
    parser.add_argument("before", type=Path, nargs="?", default=_HERE, help="the other checkout (default: this one)")
    parser.add_argument("--cases", nargs="+", default=["colossus-data-2"], metavar="CASE", help="cases of both")
    parser.add_argument("--hidden", type=int, default=512, help="hidden size (default %(default)s)")
    parser.add_argument("--steps-per-block", type=int, default=2, help="timed steps in a block (default %(default)s)")
    parser.add_argument("--serve", metavar="CASE", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if not (arguments.before / "benchmarks" / "train_step.py").is_file():
        parser.error(f"{arguments.before}: no checkout of this project: it has no benchmarks/train_step.py")
    if arguments.serve:
        serve(arguments.serve, arguments.hidden)
        return 0
    hidden, blocks = (0, 2) if arguments.smoke else (arguments.hidden, arguments.blocks)
    checkouts = {"before": arguments.before.resolve(), "after": _HERE}
    with ExitStack() as stack:
        servers: dict[str, Any] = {}
        for case in arguments.cases:
            for moment, checkout in checkouts.items():
                common.progress(f"building {case} {moment}")
                servers[f"{case} {moment}"] = stack.enter_context(Server(checkout, case, hidden))
        runners = {
            label: lambda server=server: server.seconds(arguments.steps_per_block)  # type: ignore[misc]
            for label, server in servers.items()
        }
        series = common.alternate(runners, blocks)
    first = next(iter(series))
    rows = []
    for label, seconds in series.items():
        before = f"{label.rpartition(' ')[0]} before"
        cells = common.ratio(series, label, before), common.ratio(series, label, first)
        rows.append((label, f"{common.Spread.of(seconds).median * 1e3:.2f}", *cells))
    common.print_table(
        f"hidden {hidden or 'of --smoke'}; {blocks} blocks: median [quartiles] of the ratio in each block",
        ("case", "ms/step", "time / before", f"time / {first}"), rows,
    )  # fmt: skip
    common.write_json(arguments.json, {"seconds_per_step": series})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
