"""The parser that all commands share: errors that suggest what to type, overrides, names of runs."""

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
from colossus.config import Config, ConfigError, state_config
from colossus.config.user_path import user_path
from colossus.launch import run_folder
from colossus.launch.auto_plan import resolve_planned
from colossus.registry import nearest

OVERRIDES = """\
overrides are section.key=value and win over the file:
  train.steps=50  parallel.tensor=4  parallel.tensor.mode=2d  model.hidden_size=256
"""

EXIT_CODES = (
    "exit codes: 0 done, 1 failed at run time, 2 wrong config or usage, 3 verify, diff or plan --check\n"
    "            found a difference, 130 stopped by Ctrl-C, 129 by a hang-up, 143 by SIGTERM, SIGUSR1 or SIGUSR2 (a\n"
    "            batch system), 141 the reader of the output has ended (a training run goes on without it);\n"
    "            torchrun has codes of its own: 1, whatever the code of the rank\n"
)

#: help of an argument that names a checkpoint
CHECKPOINT = "a checkpoint, a folder of checkpoints, a run folder, or the name of a run (the newest of runs/NAME-*)"


class Parser(argparse.ArgumentParser):
    """The argument parser of a command. Its errors suggest what to type instead."""

    def __init__(self, prog: str, description: str, epilog: str, **options: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, None, description, epilog, formatter_class=formatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        hint = ""
        if message.startswith("the following arguments are required"):
            message = message.replace(", section.key=value", "")  # none is required, but argparse lists it
        unknown = message.removeprefix("unrecognized arguments: ").split()
        if message.startswith("unrecognized arguments") and unknown:
            option = unknown[0].partition("=")[0]
            options = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
            close = nearest(option, options)
            if "." in option:
                hint = f"\n  overrides have no dashes: {unknown[0].lstrip('-')}"
            elif close:
                hint = f"\n  did you mean {close}?"
        self.exit(2, f"{self.prog}: {message}{hint}\n  see {self.prog} --help\n")

    def add_file(self) -> None:
        self.add_path("file", "FILE", "config file (Python)")
        self.add_overrides("override of a key of the file")

    def add_overrides(self, help_text: str) -> None:
        self.add_argument("overrides", metavar="section.key=value", nargs="*", help=help_text)

    def add_count(self, name: str, help_text: str, default: int | None = None, **options: Any) -> None:
        """Add an option that is a whole number of at least 1; its help tells the default."""
        help_text = help_text if default is None else f"{help_text} (default: {default})"
        self.add_argument(name, type=positive_integer, metavar="N", default=default, help=help_text, **options)

    def add_path(self, name: str, metavar: str, help_text: str, **options: Any) -> None:
        """Add an argument or an option that is a path."""
        self.add_argument(name, type=path_argument, metavar=metavar, help=help_text, **options)

    def add_average(self) -> None:
        self.add_argument(
            "--weights",
            metavar="NAME",
            dest="average",
            help="ema or swa: the average of the weights that a hook of the run kept (default: the weights themselves)",
        )

    def add_nproc(self, help_text: str, default: int | None = None) -> None:
        self.add_argument("--nproc", type=positive_integer, metavar="N", default=default, help=help_text)


def number_argument(wanted: str, is_right: Callable[[float], bool], kind: type[float] = float) -> Callable[[str], Any]:
    """Return the argparse type of a finite number.

    Args:
        wanted: description of the number for its error: ``a number above zero``.
        is_right: whether a number is accepted.
        kind: ``int`` for whole numbers.
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
    """Return a path with ``~`` expanded; the argparse type of paths."""
    try:
        return os.fspath(user_path(text)) if text else text
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


positive_integer = number_argument("a whole number of at least 1", lambda value: value >= 1, int)


def size_argument(text: str) -> int:
    """Return the bytes of a size of memory (see `parse_bytes`); the argparse type of sizes."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def load(arguments: argparse.Namespace) -> Config:
    """Load the config of a command line, for the processes of ``--nproc`` or of torchrun's ``WORLD_SIZE``.

    A config that leaves the plan open gets the best one; standard error says which.
    """
    ranks = os.environ.get("WORLD_SIZE", "")
    world_size = int(ranks) if ranks.isdecimal() and int(ranks) else None
    config, lines = resolve_planned(state_config(arguments.file, arguments.overrides), arguments.nproc or world_size)
    if lines:
        print("\n".join(lines), file=sys.stderr)
    return config


def call(module: str, function: str, arguments: argparse.Namespace, *positional: str) -> int:
    """Import a module that is slow to import, and call its function with the arguments of a parser.

    Args:
        module, function: names of the two.
        arguments: keyword arguments of the function.
        positional: names of those that are passed by position.

    Returns:
        The exit code.
    """
    options = dict(vars(arguments))
    first = [options.pop(name) for name in positional]
    code: int = getattr(importlib.import_module(module), function)(*first, **options)
    return code


def path_of(name: str) -> Path:
    """Return the path of this name, or else the folder of the newest run of this name that has a checkpoint.

    Raises:
        CheckpointError: there is neither.
    """
    path = Path(name)
    if path.exists() or path.name != name:
        return path
    runs = run_folder.of_name(name)
    for run in runs:
        if find_latest(root_of(None, run)) is not None:
            return run
    if runs:
        raise CheckpointError(f"{name}: no such path, and no run in runs/{name}-* has a checkpoint")
    raise CheckpointError(f"{name}: no such path, and there is no run in runs/{name}-*")
