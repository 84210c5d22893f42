"""The ``colossus`` command. A command that needs torch imports it itself, so that the others answer at once."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence

from colossus import __version__
from colossus.checkpoint.describe import printable
from colossus.checkpoint.errors import CheckpointError, DamagedCheckpoint
from colossus.cli.parser import EXIT_CODES
from colossus.config import ConfigError
from colossus.config_module import put_on_path
from colossus.registry import nearest

#: module of each command, with its parser and ``run``
COMMANDS = {
    "new": "new",
    "launch": "launch",
    "config": "print_config",
    "show": "show",
    "plan": "plan",
    "doctor": "doctor",
    "verify": "verify",
    "compare": "compare",
    "plot": "plot",
    "profile": "profile",
    "bench": "bench",
    "evaluate": "evaluate",
    "generate": "generate",
    "data": "data",
    "checkpoint": "checkpoint",
}

SUMMARY = """\
usage: colossus COMMAND ...

Train large models on many processes. A Python config file declares the model, the data and the parallel plan.

commands:
  new DIR       write a config and a training script to start from
  launch FILE   train
  config FILE   print the resolved config
  show FILE     print the ranks of a plan, its pipeline schedule (--timeline), the graph of its replicas (--graph),
                or the bytes sent for each parameter (--strategy)
  plan FILE     find the fastest plans for a number of devices, and predict their time and memory
  doctor        test this machine: devices, backend, cores, speed between ranks, ports
  verify FILE   train a few steps under the plan and in one process, and name the first difference
  compare FILE  train under several data-parallel strategies or plans, and print one table
  plot RUN...   draw loss, speed, memory and more by step, tokens or time, for one run or several
  profile FILE  train a few steps, and break down the time of a step
  bench FILE    time the train step under one or several plans, side by side
  evaluate DIR  print the loss of a checkpoint's model on the validation data of its run, or on other data
  generate DIR  continue text with the model of a checkpoint
  data prepare|show FILE
                prepare the documents of a config, or print rows of its training data
  checkpoint inspect|verify|diff|convert DIR
                print what a checkpoint has, verify its files, compare two, or convert its weights

options:
  --version     print the version
  -h, --help    print this help; 'colossus COMMAND --help' prints a command's

a first run:
  colossus config configs/gpt_stdlib.py
  colossus show configs/gpt_stdlib.py parallel.tensor=2
  colossus plan configs/gpt_stdlib.py --devices 4
  colossus launch configs/gpt_stdlib.py train.steps=50
  colossus verify configs/gpt_stdlib.py
  colossus evaluate gpt_stdlib
  colossus generate gpt_stdlib --prompt "def "

"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    The codes are 0 for done, 1 for failed at run time, 2 for a wrong config or usage, and 3 for a difference that was
    searched for. A run that a signal stops returns 128 plus the number of the signal.
    """
    with contextlib.suppress(AttributeError, ValueError):  # a character that the terminal cannot show must not fail
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    command, *words = list(sys.argv[1:] if argv is None else argv) or [""]
    if command in ("", "-h", "--help", "help"):
        print(SUMMARY + EXIT_CODES, end="", file=sys.stdout if command else sys.stderr)
        return 0 if command else 2
    if command == "--version":
        print(f"colossus {__version__}")
        return 0
    if command not in COMMANDS:
        close = f"launch {command}" if command.endswith(".py") else nearest(command, list(COMMANDS))
        hint = f"; did you mean colossus {close}?" if close else ";"
        print(f"colossus: {command!r} is no command{hint} commands: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return _stoppable(lambda: _run(command, words))


def _run(command: str, words: list[str]) -> int:
    if command == "config" and "--help" in words[:-1]:  # --help KEY
        words[words.index("--help")] = "--key"
    put_on_path()
    module = importlib.import_module(f"colossus.cli.{COMMANDS[command]}")
    parser = module.make_parser()
    parse = parser.parse_args if command == "checkpoint" else parser.parse_intermixed_args
    try:
        arguments = parse(words)
    except SystemExit as stop:
        return int(stop.code or 0)
    return int(module.run(arguments))


def _stoppable(run: Callable[[], int]) -> int:
    """Run a command and return its exit code, also if its config is wrong or it is stopped from outside."""
    try:
        return run()
    except (ConfigError, CheckpointError) as error:
        print(f"colossus: {printable(str(error))}", file=sys.stderr)
        return 1 if isinstance(error, DamagedCheckpoint) else 2
    except KeyboardInterrupt:  # a running launch and its ranks handle signals themselves
        print("colossus: stopped by Ctrl-C", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) has ended: Python must not write at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
