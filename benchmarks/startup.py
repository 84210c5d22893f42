"""Seconds until the command line answers, beside an interpreter that does nothing and one that imports torch.

    python -m benchmarks.startup

Nothing that needs no tensor may import torch, which costs seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import common
from benchmarks.common import Spread

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "gpt_stdlib.py"
NOTHING = "python -c pass"


@dataclass(frozen=True)
class Command:
    """Words after ``python``, and what it must end with."""

    words: tuple[str, ...]
    code: int = 0

    def seconds(self) -> float:
        """Return the wall time of one run.

        Raises:
            RuntimeError: when it ends with another exit code: then it did not do what is measured.
        """
        begin = time.perf_counter()
        done = subprocess.run(
            [sys.executable, *self.words], cwd=ROOT, env=_environment(), capture_output=True, text=True
        )
        elapsed = time.perf_counter() - begin
        if done.returncode != self.code:
            raise RuntimeError(f"{' '.join(self.words)}: exit code {done.returncode}, not {self.code}\n{done.stderr}")
        return elapsed


def _environment() -> dict[str, str]:
    """Return the environment without what a launcher sets."""
    return {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


def commands(folder: Path) -> dict[str, Command]:
    """Return the commands that are timed; a config with a misspelt key is written to ``folder``."""
    wrong = folder / "wrong.py"
    wrong.write_text(CONFIG.read_text() + "train = dict(step=1)\n")
    cli = ("-m", "colossus")
    return {
        NOTHING: Command(("-c", "pass")),
        "colossus --help": Command((*cli, "--help")),
        "colossus launch --help": Command((*cli, "launch", "--help")),
        "colossus launch, misspelt key": Command((*cli, "launch", str(wrong)), code=2),
        "colossus launch, sizes that do not multiply": Command((*cli, "launch", str(CONFIG), "--nproc", "3"), code=2),
        "colossus config": Command((*cli, "config", str(CONFIG))),
        "colossus show": Command((*cli, "show", str(CONFIG))),
        "import torch": Command(("-c", "import torch")),
    }


def main(argv: Sequence[str] | None = None) -> int:
    arguments = common.make_parser(__doc__, blocks=9).parse_args(argv)
    blocks = 1 if arguments.smoke else arguments.blocks
    with tempfile.TemporaryDirectory() as folder:
        timed = commands(Path(folder))
        if arguments.smoke:
            del timed["import torch"]
        for command in timed.values():  # files into the cache of the system, bytecode written
            command.seconds()
        series = common.alternate({name: partial(Command.seconds, what) for name, what in timed.items()}, blocks)
    rows = [
        (name, f"{Spread.of(taken).median:.3f}", common.ratio(series, name, NOTHING)) for name, taken in series.items()
    ]
    common.print_table(
        f"seconds until the answer, {blocks} runs each", ("command", "seconds", f"time / {NOTHING}"), rows
    )
    common.write_json(arguments.json, {"seconds": series})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
