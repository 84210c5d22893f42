"""``colossus checkpoint``: what is in one, whether it is whole, what differs between two; weights in other forms."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from colossus.arithmetic import byte_count
from colossus.checkpoint.describe import as_data, describe, printable
from colossus.checkpoint.durable import problem_of
from colossus.checkpoint.errors import CheckpointError, DamagedCheckpoint
from colossus.checkpoint.folder import IN_RUN_FOLDER, locate, named, require_files
from colossus.checkpoint.weight_sources import find_weights, manifest_of, open_weights
from colossus.cli import convert
from colossus.cli.checkpoint_parsers import parse
from colossus.cli.parser import path_of
from colossus.cli.progress import Progress

if TYPE_CHECKING:
    from colossus.checkpoint.diff import Difference, TensorDifference

#: differences of each kind that are printed without --all
_MOST_PRINTED = 20


def run(words: Sequence[str]) -> int:
    """Run one of the commands: 0 done or equal, 1 damaged, 2 no checkpoint or wrong usage, 3 they differ."""
    try:
        command, arguments = parse(list(words))
    except SystemExit as stop:
        return int(stop.code or 0)
    log = logging.getLogger("colossus.checkpoint")
    level = log.level
    log.setLevel(logging.ERROR)  # what was passed over is told here
    try:
        return {"inspect": _inspect, "verify": _verify, "diff": _diff, "convert": convert.run}[command](arguments)
    except CheckpointError as error:
        _say(f"colossus checkpoint {command}: {error}")
        return 1 if isinstance(error, DamagedCheckpoint) else 2
    finally:
        log.setLevel(level)


def _find(given: str, find: Callable[..., Path] = find_weights) -> tuple[Path, dict[Path, CheckpointError]]:
    """The folder that is meant, and those newer checkpoints that were passed over because they are damaged."""
    damaged: dict[Path, CheckpointError] = {}
    found = find(path_of(given), damaged)
    for error in damaged.values():
        _say(f"damaged: {error}")
    if damaged:
        _say(f"so {found} was taken, from which a run would resume")
    return found, damaged


# -- inspect and verify -----------------------------------------------------------------------------------


def _inspect(arguments: argparse.Namespace) -> int:
    found, _ = _find(arguments.dir)
    manifest = manifest_of(found)
    if arguments.json:
        print(json.dumps(as_data(found, manifest, everything=arguments.all), indent=2))
    else:
        print(describe(found, manifest, everything=arguments.all))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    if arguments.all:
        folders = _all_of(path_of(arguments.dir))
        return max(_verify_one(each) for each in folders)
    found, passed_over = _find(arguments.dir, locate)
    return max(_verify_one(found), 1 if passed_over else 0)


def _all_of(given: Path) -> list[Path]:
    """Every checkpoint in a folder of them, or in a run folder, by step: also those that `locate` passes over."""
    for root in (given, given / IN_RUN_FOLDER):
        if found := named(root):
            return list(found)
    return [locate(given)]


def _verify_one(folder: Path) -> int:
    try:
        manifest = require_files(folder)
    except DamagedCheckpoint as error:
        _say(f"damaged: {error}")
        return 1
    progress, began = Progress(manifest.num_bytes), time.perf_counter()
    problems = []
    for name, file in manifest.files.items():
        problem = problem_of(folder / name, file.crc32, progress.block)
        progress.file_done(file.num_bytes)
        if problem is not None:
            problems.append(problem)
    progress.end()
    for problem in problems:
        _say(f"{folder / problem}")
    count, seconds = len(manifest.files), time.perf_counter() - began
    if problems:
        _say(f"{folder} is damaged: {len(problems)} of {count} files; take another checkpoint")
        return 1
    print(
        printable(
            f"{folder} is whole: step {manifest.step}, {count} file{'s' * (count != 1)}, "
            f"{byte_count(manifest.num_bytes)} read in {seconds:.1f} s"
        )
    )
    return 0


# -- diff -------------------------------------------------------------------------------------------------


def _diff(arguments: argparse.Namespace) -> int:
    (a, _), (b, _) = _find(arguments.a), _find(arguments.b)
    compare = importlib.import_module("colossus.checkpoint.diff")  # torch, from here on
    importlib.import_module("torch").set_num_threads(1)  # small blocks, which more threads would wait for each other at
    with open_weights(a) as one, open_weights(b) as other:
        found: Difference = compare.diff(one, other, only=tuple(arguments.only))
    if not found.num_compared and not found.only_in_a and not found.only_in_b and not found.values and arguments.only:
        _say(f"colossus checkpoint diff: --only {' '.join(arguments.only)} meets no key of {a} or {b}; keys are")
        _say("model/NAME, optimizer/NAME/ENTRY, step, ..: see colossus checkpoint inspect --all")
        return 2
    tolerance = arguments.tolerance, arguments.absolute
    print(printable(_report(found, a, b, tolerance, everything=arguments.all)))
    return 3 if found.exceeds(*tolerance) else 0


def _report(found: Difference, a: Path, b: Path, tolerance: tuple[float, float], *, everything: bool) -> str:
    most = sys.maxsize if everything else _MOST_PRINTED
    above = [each for each in found.tensors if each.exceeds(*tolerance)]
    parts = [f"A  {a}\nB  {b}"]
    for title, keys in ((f"only in A: {len(found.only_in_a)}", found.only_in_a),
                        (f"only in B: {len(found.only_in_b)}", found.only_in_b)):  # fmt: skip
        if keys:
            parts.append(_list(title, keys, most))
    if above:
        allowed = [f"{each:g}" for each in tolerance if each]
        within = f" by more than {' or '.join(allowed)}" if allowed else ""
        parts.append(
            f"tensors that differ{within}: {len(above)} of {found.num_compared}; with the largest difference, absolute "
            f"and relative to the largest element"
        )
    for section, members in itertools.groupby(above, lambda each: each.section):
        lines = [_of_tensor(each) for each in members]
        parts.append(_list(f"{section}: {len(lines)}", lines, most))
    for title, pairs in (("state", found.values), ("no difference of state: plan, versions, config", found.about)):
        if pairs:
            parts.append(_list(f"{title}: {len(pairs)}", _pairs(pairs), most))
    if not found.exceeds(*tolerance):
        rest = f"; {len(found.tensors)} differ within what is allowed" if found.tensors else ""
        parts.append(f"equal: {found.num_compared} tensors{rest}, and all other state")
    return "\n\n".join(parts)


def _of_tensor(each: TensorDifference) -> str:
    if each.num_different is None:
        return f"{each.key}: shapes: {each.spec}"
    count = f"{each.num_different:,} of {each.num_elements:,} elements"
    gap = "nan in one" if math.isinf(each.absolute) else f"{each.absolute:.3g}, {each.relative:.3g}"
    dtypes = f"; dtypes: {each.spec}" if each.spec else ""
    return f"{each.key}: {gap if each.is_float else 'integers'}; {count}{dtypes}"


def _pairs(pairs: Mapping[str, tuple[str, str]]) -> list[str]:
    return [f"{path}: {_short(one)} in A, {_short(other)} in B" for path, (one, other) in pairs.items()]


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def _list(title: str, lines: Iterable[str], most: int) -> str:
    lines = list(lines)
    more = [f"  .. {len(lines) - most:,} more: --all prints them"] if len(lines) > most else []
    return "\n".join([title, *(f"  {line}" for line in lines[:most]), *more])


def _say(text: str) -> None:
    print(printable(text), file=sys.stderr)
