"""``colossus checkpoint``: inspect, verify, diff and convert checkpoints."""

from __future__ import annotations

import argparse
import importlib
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from colossus.arithmetic import byte_count
from colossus.checkpoint.describe import describe, printable
from colossus.checkpoint.durable import problem_of
from colossus.checkpoint.errors import CheckpointError, DamagedCheckpoint
from colossus.checkpoint.folder import IN_RUN_FOLDER, checkpoint_steps, locate, require_files
from colossus.checkpoint.weight_sources import find_weights, manifest_of, open_weights
from colossus.cli import convert
from colossus.cli.parser import CHECKPOINT, Parser, number_argument, path_of

if TYPE_CHECKING:
    from colossus.checkpoint.diff import Difference, TensorDifference

#: differences of each kind that are printed without --all
_MOST_PRINTED = 20


def make_parser() -> Parser:
    parser = Parser(
        "colossus checkpoint",
        f"Look at checkpoints. DIR is {CHECKPOINT}.\n"
        "Of several checkpoints in it, the one that a run would resume from is used. inspect, diff and convert also\n"
        "accept a model folder of Hugging Face.",
        "examples:\n  colossus checkpoint inspect runs/first\n"
        "  colossus checkpoint verify runs/first/checkpoints/step-00000500\n"
        "  colossus checkpoint diff runs/first runs/second --only 'model/*' --tolerance 1e-6\n"
        "  colossus checkpoint convert runs/first models/first --to hf\n\n"
        "'colossus checkpoint COMMAND --help' prints the help of a command.\n",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    inspect = commands.add_parser(
        "inspect",
        help="print step, plan, versions, and a table of parameters with shapes and sizes",
        description="Print the contents of a checkpoint: step, time, versions and plan; the bytes of parameters and\n"
        "of optimizer state; the full shape, dtype and size of each parameter, whatever the plan was. Parameters\n"
        "that layers of a list have alike share one row. Only manifest.json is read, which has the same as JSON.",
        epilog="exit codes: 0 printed, 1 damaged, 2 no checkpoint or wrong usage\n",
    )
    inspect.add_path("dir", "DIR", CHECKPOINT)
    inspect.add_argument("--all", action="store_true", help="print a row for every tensor, optimizer state included")
    inspect.set_defaults(run=_inspect)
    verify = commands.add_parser(
        "verify",
        help="read all files of a checkpoint and compare their checksums",
        description="Read all files of a checkpoint and compare their sizes and checksums with those that were\n"
        "recorded. In a folder of checkpoints the newest is verified; if it lacks files, this is reported, and the\n"
        "one that a run would resume from is verified.",
        epilog="exit codes: 0 whole, 1 damaged (the file is named), 2 no checkpoint or wrong usage, 130 Ctrl-C\n",
    )
    verify.add_path("dir", "DIR", CHECKPOINT)
    verify.add_argument("--all", action="store_true", help="verify every checkpoint of the folder, by step")
    verify.set_defaults(run=_verify)
    diff = commands.add_parser(
        "diff",
        help="print the differences of two checkpoints, whatever the plans that saved them",
        description="Print the differences of two checkpoints: tensors that only one has, shapes, dtypes, the largest\n"
        "difference of each tensor (absolute, and relative to its largest element), and state that is no tensor, such\n"
        "as the step. Different plans and configs are printed, but do not count as a difference; under different\n"
        "plans the generators of ranks are not compared. Only a block of each checkpoint is in memory at a time.",
        epilog="exit codes: 0 equal (within a tolerance), 1 damaged, 2 no checkpoint or wrong usage, 3 they differ,\n"
        "            130 stopped by Ctrl-C\n\n"
        "examples:\n  colossus checkpoint diff runs/a runs/b\n"
        "  colossus checkpoint diff runs/plain runs/tensor4 --only 'model/*' --only 'optimizer/*' --tolerance 1e-5\n",
    )
    diff.add_path("a", "A", CHECKPOINT)
    diff.add_path("b", "B", "another one")
    tolerance = number_argument("a number, 0 or more", lambda value: value >= 0.0)
    help_text = "allowed difference, relative to the largest element of a tensor (default: 0, the same bits)"
    diff.add_argument("--tolerance", type=tolerance, default=0.0, metavar="T", help=help_text)
    help_text = "absolute difference that is allowed in any case, for tensors of mere rounding errors (default: 0)"
    diff.add_argument("--absolute", type=tolerance, default=0.0, metavar="T", help=help_text)
    help_text = "compare only the keys that match: model/NAME, optimizer/NAME/ENTRY, step, ..; may be repeated"
    diff.add_argument("--only", action="append", default=[], metavar="PATTERN", help=help_text)
    diff.add_argument("--all", action="store_true", help=f"print every difference, not the largest {_MOST_PRINTED}")
    diff.set_defaults(run=_diff)
    convert.add_parser(commands)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Run a subcommand and return its exit code: 0 done or equal, 1 damaged, 3 the checkpoints differ."""
    log = logging.getLogger("colossus.checkpoint")
    level = log.level
    log.setLevel(logging.ERROR)  # `_find` itself prints which damaged checkpoints it skips
    try:
        code: int = arguments.run(arguments)
        return code
    finally:
        log.setLevel(level)


def _find(name: str, find: Callable[..., Path] = find_weights) -> tuple[Path, dict[Path, CheckpointError]]:
    """Return the folder of a checkpoint, and the newer checkpoints that are skipped because they are damaged."""
    damaged: dict[Path, CheckpointError] = {}
    folder = find(path_of(name), damaged)
    for error in damaged.values():
        _warn(f"damaged: {error}; using {folder} instead")
    return folder, damaged


def _inspect(arguments: argparse.Namespace) -> int:
    folder, _ = _find(arguments.dir)
    print(describe(folder, manifest_of(folder), everything=arguments.all))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    if not arguments.all:
        folder, damaged = _find(arguments.dir, locate)
        return max(_verify_one(folder), 1 if damaged else 0)
    path = path_of(arguments.dir)
    folders = list(checkpoint_steps(path) or checkpoint_steps(path / IN_RUN_FOLDER)) or [locate(path)]
    return max(map(_verify_one, folders))


def _verify_one(folder: Path) -> int:
    try:
        manifest = require_files(folder)
    except DamagedCheckpoint as error:
        _warn(f"damaged: {error}")
        return 1
    problems, began = [], time.perf_counter()
    with convert.progress(manifest.num_bytes) as advance:
        for name, file in manifest.files.items():
            problems.append(problem_of(folder / name, file.crc32))
            advance(file.num_bytes)
    damaged = [folder / problem for problem in problems if problem is not None]
    for problem in damaged:
        _warn(str(problem))
    count, seconds = len(manifest.files), time.perf_counter() - began
    if damaged:
        _warn(f"{folder} is damaged: {len(damaged)} of {count} files; take another checkpoint")
        return 1
    size = byte_count(manifest.num_bytes)
    print(printable(f"{folder} is whole: step {manifest.step}, {count} files, {size} read in {seconds:.1f} s"))
    return 0


def _diff(arguments: argparse.Namespace) -> int:
    (a, _), (b, _) = _find(arguments.a), _find(arguments.b)
    compare = importlib.import_module("colossus.checkpoint.diff")  # which imports torch
    importlib.import_module("torch").set_num_threads(1)  # blocks are small: more threads would wait for each other
    with open_weights(a) as one, open_weights(b) as other:
        difference: Difference = compare.diff(one, other, only=tuple(arguments.only))
    matched = difference.num_compared or difference.only_in_a or difference.only_in_b or difference.values
    if arguments.only and not matched:
        raise CheckpointError(f"--only {' '.join(arguments.only)} matches no key: `inspect --all` prints the keys")
    tolerance = arguments.tolerance, arguments.absolute
    print(printable(_report(difference, a, b, tolerance, sys.maxsize if arguments.all else _MOST_PRINTED)))
    return 3 if difference.exceeds(*tolerance) else 0


def _report(difference: Difference, a: Path, b: Path, tolerance: tuple[float, float], most: int) -> str:
    above = [_tensor_line(tensor) for tensor in difference.tensors if tensor.exceeds(*tolerance)]
    sections: dict[str, Sequence[str]] = {
        "only in A": difference.only_in_a,
        "only in B": difference.only_in_b,
        "tensors that differ, with the largest difference, absolute and relative to the largest element": above,
        "state": _pair_lines(difference.values),
        "no difference of state: plan, versions, config": _pair_lines(difference.about),
    }
    parts = [f"A  {a}\nB  {b}"]
    for title, lines in sections.items():
        more = [f".. {len(lines) - most:,} more: --all prints them"] if len(lines) > most else []
        if lines:
            parts.append("\n  ".join([f"{title}: {len(lines)}", *lines[:most], *more]))
    if not difference.exceeds(*tolerance):
        within = f"; {len(difference.tensors)} differ within the tolerance" if difference.tensors else ""
        parts.append(f"equal: {difference.num_compared} tensors{within}, and all other state")
    return "\n\n".join(parts)


def _tensor_line(tensor: TensorDifference) -> str:
    if tensor.num_different is None:
        return f"{tensor.key}: shapes: {tensor.spec}"
    count = f"{tensor.num_different:,} of {tensor.num_elements:,} elements"
    gap = "nan in one" if math.isinf(tensor.absolute) else f"{tensor.absolute:.3g}, {tensor.relative:.3g}"
    dtypes = f"; dtypes: {tensor.spec}" if tensor.spec else ""
    return f"{tensor.key}: {gap if tensor.is_float else 'integers'}; {count}{dtypes}"


def _pair_lines(pairs: Mapping[str, tuple[str, str]]) -> list[str]:
    return [f"{path}: {one[:80]} in A, {other[:80]} in B" for path, (one, other) in pairs.items()]


def _warn(text: str) -> None:
    print(printable(text), file=sys.stderr)
