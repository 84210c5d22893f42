"""``colossus checkpoint``: what is in one, whether it is whole, what differs between two; weights in other forms."""

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
from colossus.checkpoint.folder import IN_RUN_FOLDER, locate, named, require_files
from colossus.checkpoint.weight_sources import find_weights, manifest_of, open_weights
from colossus.cli import convert
from colossus.cli.parser import WHAT, Parser, number_argument, path_argument, path_of

if TYPE_CHECKING:
    from colossus.checkpoint.diff import Difference, TensorDifference

#: differences of a kind that are printed without --all
_MOST_PRINTED = 20


def make_parser() -> Parser:
    parser = Parser(
        "colossus checkpoint",
        f"Look at checkpoints. DIR is {WHAT};\n"
        "of several the one is taken that a run would resume from. inspect, diff and convert take a model folder of\n"
        "Hugging Face, too.",
        "examples:\n  colossus checkpoint inspect runs/first\n"
        "  colossus checkpoint verify runs/first/checkpoints/step-00000500\n"
        "  colossus checkpoint diff runs/first runs/second --only 'model/*' --tolerance 1e-6\n"
        "  colossus checkpoint convert runs/first models/first --to hf\n\n"
        "'colossus checkpoint COMMAND --help' tells more.\n",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    inspect = commands.add_parser(
        "inspect",
        help="step, plan, versions, a table of parameters with shapes and sizes",
        description="Print what is in a checkpoint: step, time, versions and plan; how much of it are parameters and\n"
        "optimizer state; the full shape, dtype and size of each parameter, whatever the plan was. Those that the\n"
        "layers of a list have alike are one row. Only manifest.json is read, which has all of it as JSON.",
        epilog="exit codes: 0 printed, 1 damaged, 2 no checkpoint or wrong usage\n",
    )
    inspect.add_argument("dir", type=path_argument, metavar="DIR", help=WHAT)
    inspect.add_argument("--all", action="store_true", help="a row for every tensor, optimizer state too")
    inspect.set_defaults(run=_inspect)
    verify = commands.add_parser(
        "verify",
        help="read all of its files and compare their checksums",
        description="Read all files of a checkpoint and compare their sizes and checksums with what was written. Of a\n"
        "folder of checkpoints the newest is verified; when its files are not all there, that is said, and the one is\n"
        "verified that a run would resume from.",
        epilog="exit codes: 0 whole, 1 damaged: the file is named, 2 no checkpoint or wrong usage, 130 Ctrl-C\n",
    )
    verify.add_argument("dir", type=path_argument, metavar="DIR", help=WHAT)
    verify.add_argument("--all", action="store_true", help="verify every checkpoint of the folder, by step")
    verify.set_defaults(run=_verify)
    diff = commands.add_parser(
        "diff",
        help="what differs between two, whatever the plans that saved them",
        description="Print what differs between two checkpoints: tensors that only one has, shapes, dtypes, for each\n"
        "tensor the largest difference, absolute and relative to its largest element, and state that is no tensor,\n"
        "such as the step. Plans and configs that differ are printed, and are no difference; under different plans\n"
        "the generators of ranks are not compared. Needs little memory, whatever the size.",
        epilog="exit codes: 0 equal (within a tolerance), 1 damaged, 2 no checkpoint or wrong usage, 3 they differ,\n"
        "            130 stopped by Ctrl-C\n\n"
        "examples:\n  colossus checkpoint diff runs/a runs/b\n"
        "  colossus checkpoint diff runs/plain runs/tensor4 --only 'model/*' --only 'optimizer/*' --tolerance 1e-5\n",
    )
    diff.add_argument("a", type=path_argument, metavar="A", help=WHAT)
    diff.add_argument("b", type=path_argument, metavar="B", help="another one")
    tolerance = number_argument("a number, 0 or more", lambda value: value >= 0.0)
    diff.add_argument(
        "--tolerance",
        type=tolerance,
        default=0.0,
        metavar="T",
        help="difference that is allowed, relative to the largest element of a tensor (default: 0, the same bits)",
    )
    diff.add_argument(
        "--absolute",
        type=tolerance,
        default=0.0,
        metavar="T",
        help="absolute difference that is allowed anyway: for tensors of nothing but rounding (default: 0)",
    )
    diff.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="compare only keys that this matches: model/NAME, optimizer/NAME/ENTRY, step, ..; may be repeated",
    )
    diff.add_argument("--all", action="store_true", help="print every difference, not the largest 20")
    diff.set_defaults(run=_diff)
    convert.add_parser(commands)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Run one of the commands: 0 done or equal, 1 damaged, 2 no checkpoint or wrong usage, 3 they differ."""
    log = logging.getLogger("colossus.checkpoint")
    level = log.level
    log.setLevel(logging.ERROR)  # what was passed over is told here
    try:
        code: int = arguments.run(arguments)
        return code
    finally:
        log.setLevel(level)


def _find(given: str, find: Callable[..., Path] = find_weights) -> tuple[Path, dict[Path, CheckpointError]]:
    """The folder that is meant, and those newer checkpoints that were passed over because they are damaged."""
    damaged: dict[Path, CheckpointError] = {}
    found = find(path_of(given), damaged)
    for error in damaged.values():
        _say(f"damaged: {error}; {found} is taken")
    return found, damaged


def _inspect(arguments: argparse.Namespace) -> int:
    found, _ = _find(arguments.dir)
    print(describe(found, manifest_of(found), everything=arguments.all))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    if not arguments.all:
        found, passed_over = _find(arguments.dir, locate)
        return max(_verify_one(found), 1 if passed_over else 0)
    given = path_of(arguments.dir)
    folders = list(named(given) or named(given / IN_RUN_FOLDER)) or [locate(given)]
    return max(_verify_one(each) for each in folders)


def _verify_one(folder: Path) -> int:
    try:
        manifest = require_files(folder)
    except DamagedCheckpoint as error:
        _say(f"damaged: {error}")
        return 1
    problems, began = [], time.perf_counter()
    with convert.progress(manifest.num_bytes) as advance:
        for name, file in manifest.files.items():
            problems.append(problem_of(folder / name, file.crc32))
            advance(file.num_bytes)
    found = [folder / problem for problem in problems if problem is not None]
    for problem in found:
        _say(str(problem))
    count, seconds = len(manifest.files), time.perf_counter() - began
    if found:
        _say(f"{folder} is damaged: {len(found)} of {count} files; take another checkpoint")
        return 1
    size = byte_count(manifest.num_bytes)
    print(printable(f"{folder} is whole: step {manifest.step}, {count} files, {size} read in {seconds:.1f} s"))
    return 0


def _diff(arguments: argparse.Namespace) -> int:
    (a, _), (b, _) = _find(arguments.a), _find(arguments.b)
    compare = importlib.import_module("colossus.checkpoint.diff")  # torch, from here on
    importlib.import_module("torch").set_num_threads(1)  # small blocks, which more threads would wait for each other at
    with open_weights(a) as one, open_weights(b) as other:
        found: Difference = compare.diff(one, other, only=tuple(arguments.only))
    if arguments.only and not (found.num_compared or found.only_in_a or found.only_in_b or found.values):
        raise CheckpointError(f"--only {' '.join(arguments.only)} meets no key: `inspect --all` prints the keys")
    tolerance = arguments.tolerance, arguments.absolute
    print(printable(_report(found, a, b, tolerance, sys.maxsize if arguments.all else _MOST_PRINTED)))
    return 3 if found.exceeds(*tolerance) else 0


def _report(found: Difference, a: Path, b: Path, tolerance: tuple[float, float], most: int) -> str:
    above = [_of_tensor(each) for each in found.tensors if each.exceeds(*tolerance)]
    sections: dict[str, Sequence[str]] = {
        "only in A": found.only_in_a,
        "only in B": found.only_in_b,
        "tensors that differ, with the largest difference, absolute and relative to the largest element": above,
        "state": _pairs(found.values),
        "no difference of state: plan, versions, config": _pairs(found.about),
    }
    parts = [f"A  {a}\nB  {b}"]
    for title, lines in sections.items():
        more = [f".. {len(lines) - most:,} more: --all prints them"] if len(lines) > most else []
        if lines:
            parts.append("\n  ".join([f"{title}: {len(lines)}", *lines[:most], *more]))
    if not found.exceeds(*tolerance):
        within = f"; {len(found.tensors)} differ within what is allowed" if found.tensors else ""
        parts.append(f"equal: {found.num_compared} tensors{within}, and all other state")
    return "\n\n".join(parts)


def _of_tensor(each: TensorDifference) -> str:
    if each.num_different is None:
        return f"{each.key}: shapes: {each.spec}"
    count = f"{each.num_different:,} of {each.num_elements:,} elements"
    gap = "nan in one" if math.isinf(each.absolute) else f"{each.absolute:.3g}, {each.relative:.3g}"
    dtypes = f"; dtypes: {each.spec}" if each.spec else ""
    return f"{each.key}: {gap if each.is_float else 'integers'}; {count}{dtypes}"


def _pairs(pairs: Mapping[str, tuple[str, str]]) -> list[str]:
    return [f"{path}: {one[:80]} in A, {other[:80]} in B" for path, (one, other) in pairs.items()]


def _say(text: str) -> None:
    print(printable(text), file=sys.stderr)
