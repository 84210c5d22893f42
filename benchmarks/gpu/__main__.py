"""Run everything that wants a real GPU: parity, ranks that share one device, precisions, saves, speed.

    scripts/test-gpu                                   # all, in ten minutes
    scripts/test-gpu --only layers waits --json gpu.json
    scripts/test-gpu --device cpu --budget 120         # what of it can be run without a GPU

Each section runs in a process of its own, each of its cases against a time-out. A case that fails, crashes or hangs is
one row that says what happened; the sections behind it run. What cannot be run here is left out, and its row says why.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.gpu import signals
from benchmarks.gpu.section import Row, choose
from benchmarks.gpu.sections import SECTIONS

ROOT = Path(__file__).resolve().parents[2]
OLDEST_TORCH = "2.11"  # as in pyproject.toml
ORDER = {section.name: number for number, section in enumerate(SECTIONS)}


def make_parser() -> argparse.ArgumentParser:
    sections = "\n".join(f"  {section.name:<14}{section.seconds:>5.0f} s  {section.about}" for section in SECTIONS)
    parser = argparse.ArgumentParser(
        prog="scripts/test-gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"sections, in their order, with the seconds each has of 600:\n{sections}\n\n"
        "exit code: 0 nothing failed, 1 some case did, 2 wrong arguments, 128 + the signal that ended it (130\n"
        "Ctrl-C): what was done is shown, and written\n\n"
        "nothing can be installed: INSTALL=no PYTHON=python3 scripts/test-gpu takes that Python with its own torch,\n"
        f"{OLDEST_TORCH} or newer",
    )  # fmt: skip
    parser.add_argument("--only", nargs="+", metavar="SECTION", default=[], help="these sections")
    parser.add_argument("--skip", nargs="+", metavar="SECTION", default=[], help="all but these sections")
    parser.add_argument(
        "--budget", type=float, default=600.0, metavar="SECONDS", help="for all (default %(default).0f)"
    )
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto",
        help="auto (default): the first CUDA device, or what can be run on the CPU where there is none",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as they come")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="of the sections' output (default: a new one)")
    return parser


def missing_packages() -> list[str]:
    """What colossus and the sections import and this Python has not, or not as new as they need it."""
    wanted = ("torch", "numpy", "pydantic", "rich", "safetensors")
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if "torch" not in missing and _numbers(found := importlib.metadata.version("torch")) < _numbers(OLDEST_TORCH):
        missing.append(f"torch {OLDEST_TORCH} or newer (its torch is {found})")
    return missing


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def find_devices() -> tuple[int, str]:
    """How many CUDA devices torch has, and why none. Another process asks: one that has asked cannot be forked."""
    ask = "import torch; print(torch.version.cuda or '', torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    if done.returncode:
        return 0, f"torch cannot be imported:\n{done.stderr}"
    *cuda, count = done.stdout.split()
    if int(count):
        return int(count), ""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not cuda:
        return 0, "this torch is built for the CPU only"
    return 0, "torch finds no CUDA device" + (f" (CUDA_VISIBLE_DEVICES={hidden!r})" if hidden is not None else "")


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    given = parser.parse_args(argv)
    names = [section.name for section in SECTIONS]
    for name in (*given.only, *given.skip):
        if name not in names:
            parser.error(f"there is no section {name!r}; there are {', '.join(names)}")
    if not given.budget > 0:
        parser.error(f"--budget is seconds, at least 1, got {given.budget}")
    chosen = [section for section in choose(SECTIONS, given.only) if section.name not in given.skip]
    if missing := missing_packages():
        parser.error(f"{sys.executable} has no {', '.join(missing)}: install them there, or run without INSTALL=no")
    count, why = find_devices() if given.device != "cpu" else (0, "--device cpu")
    if given.device == "cuda" and not count:
        parser.error(f"--device cuda: {why}")
    device = "cuda:0" if count else "cpu"
    logs = given.logs or Path(tempfile.mkdtemp(prefix="colossus-test-gpu-"))
    logs.mkdir(parents=True, exist_ok=True)
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
    print(f"device {device}" + ("" if count else f" ({why})") + f", logs in {logs}", file=sys.stderr, flush=True)

    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # so that asking for devices does not use them
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):  # of a launcher around this
        os.environ.pop(name, None)
    sys.path.insert(0, str(ROOT / "tests"))  # of the sections that use the helpers of tests
    from benchmarks.gpu.runner import Runner  # imports torch

    about = {"device": device, "devices": count, "without_device": why, "budget": given.budget}
    with signals.as_errors():
        rows, code = collect(Runner(device, given.budget, logs).run(chosen), given.json, about)
    if not count:
        print(f"nothing of this was run on a GPU: {why}")
    return code or int(any(row.result == "failed" for row in rows))


def collect(made: Generator[Row], file: Path | None, about: Mapping[str, Any]) -> tuple[list[Row], int]:
    """The rows, shown as they come and as one table, and 0 or what a signal makes the exit code. The file is there from
    the first moment on, and complete whatever ends this."""
    from benchmarks.gpu import report

    begin, rows, code = time.monotonic(), list[Row](), 0
    ended_by: str | None = "nothing: it goes on, or was killed"

    def write() -> None:
        if file is not None:
            report.write_json(file, rows, {**about, "seconds": time.monotonic() - begin, "ended by": ended_by})

    try:
        with closing(made):
            write()
            for row in made:
                rows.append(row)
                print(report.line(row), file=sys.stderr, flush=True)
                write()
        ended_by = None
    except signals.Signalled as error:
        ended_by, code = str(error), error.exit_code
    except BaseException as error:
        ended_by = f"{type(error).__name__}: {error}"
        raise
    finally:
        write()
        report.print_table(sorted(rows, key=lambda row: ORDER[row.section]))  # cases that were postponed came last
        told = f"{report.in_words(rows)} in {time.monotonic() - begin:.0f} s"
        print(told + (f", ended by {ended_by}" if ended_by else ""))
        if file is not None:
            print(f"written to {file.resolve()}")
    return rows, code


if __name__ == "__main__":
    sys.exit(main())
