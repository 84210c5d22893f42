"""What the parsers of all commands share: errors that say what to type instead, overrides, names of runs."""

from __future__ import annotations

import argparse
import importlib
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from colossus.arithmetic import parse_bytes
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.folder import find_latest, root_of
from colossus.config import Config, ConfigError
from colossus.config.user_path import user_path
from colossus.launch import run_folder
from colossus.launch.auto_plan import load_planned
from colossus.registry import nearest

OVERRIDES = """\
overrides are section.key=value and win over the file:
  train.steps=50  parallel.tensor=4  parallel.tensor.mode=2d  model.hidden_size=256
"""

EXIT_CODES = (
    "exit codes: 0 done, 1 failed at run time, 2 wrong config or usage, 3 verify, diff or plan --check\n"
    "            found a difference, 130 stopped by Ctrl-C, 129 by a hang-up, 143 by SIGTERM, SIGUSR1 or SIGUSR2 (a\n"
    "            batch system); 141 what reads the output has ended (not of a run that trains, which goes\n"
    "            on without); under torchrun the exit code is torchrun's own, 1 whatever the rank's was\n"
)

#: what a command line calls a checkpoint, for ``--help``
WHAT = "a checkpoint, a folder of checkpoints, a run folder, or the name of a run (the newest of runs/NAME-*)"


class Parser(argparse.ArgumentParser):
    """An argument parser of one command; its errors say what to type instead."""

    def __init__(self, prog: str, description: str, epilog: str, **options: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, None, description, epilog, formatter_class=formatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        hint = ""
        if message.startswith("the following arguments are required"):
            message = message.replace(", section.key=value", "")  # of which none is enough
        unknown = message.removeprefix("unrecognized arguments: ").split()
        if message.startswith("unrecognized arguments") and unknown:
            option = unknown[0].partition("=")[0]
            known = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
            close = nearest(option, known)
            if "." in option:
                hint = f"\n  overrides have no dashes: {unknown[0].lstrip('-')}"
            elif close:
                hint = f"\n  did you mean {close}?"
        self.exit(2, f"{self.prog}: {message}{hint}\n  see {self.prog} --help\n")

    def add_file(self) -> None:
        self.add_argument("file", type=path_argument, metavar="FILE", help="config file (Python)")
        self.add_overrides("override of a key of the file")

    def add_overrides(self, help_text: str) -> None:
        self.add_argument("overrides", metavar="section.key=value", nargs="*", help=help_text)

    def add_average(self) -> None:
        self.add_argument(
            "--weights",
            metavar="NAME",
            dest="average",
            help="ema or swa: the average that a hook of the run has kept (default: the weights themselves)",
        )

    def add_nproc(self, help_text: str, default: int | None = None) -> None:
        self.add_argument("--nproc", type=positive_integer, metavar="N", default=default, help=help_text)


def number_argument(wanted: str, is_right: Callable[[float], bool], kind: type[float] = float) -> Callable[[str], Any]:
    """The type of an argument that is a finite number of some range.

    Args:
        wanted: for its error: ``a number above zero``.
    """

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(-1)
        if not (math.isfinite(value) and is_right(value)):
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")
        return value

    return read


def path_argument(text: str) -> str:
    """Return a path in which ``~`` is the home: the type of an argument."""
    try:
        return os.fspath(user_path(text)) if text else text
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


positive_integer = number_argument("a whole number of at least 1", lambda value: value >= 1, int)


def size_argument(text: str) -> int:
    """The type of an argument that is a size of memory, in bytes: see `parse_bytes`."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def load(arguments: argparse.Namespace) -> Config:
    """The config of a file and overrides, for as many processes as the command line or torchrun says; one that leaves
    the plan open gets the best, which is told on standard error."""
    given = os.environ.get("WORLD_SIZE", "")
    world_size = int(given) if given.isdecimal() and int(given) else None
    config, _, told = load_planned(arguments.file, arguments.overrides, arguments.nproc or world_size)
    if told:
        print("\n".join(told), file=sys.stderr)
    return config


def call(module: str, function: str, arguments: argparse.Namespace, *positional: str) -> int:
    """Import what is slow to import, and call it with the arguments of a parser, some of them by position."""
    options = dict(vars(arguments))
    first = [options.pop(name) for name in positional]
    code: int = getattr(importlib.import_module(module), function)(*first, **options)
    return code


def path_of(given: str) -> Path:
    """The path that is meant; of a name that is no path, the newest run of that name that has a checkpoint.

    Raises:
        CheckpointError: when there is neither.
    """
    path = Path(given)
    if path.exists() or path.name != given:
        return path
    runs = run_folder.of_name(given)
    for run in runs:
        if find_latest(root_of(None, run)) is not None:
            return run
    if runs:
        raise CheckpointError(f"{given}: no such path, and no run in runs/{given}-* has a checkpoint")
    raise CheckpointError(f"{given}: no such path, and there is no run in runs/{given}-*")
