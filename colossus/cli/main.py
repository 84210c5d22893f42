"""The ``colossus`` command. What needs torch is imported by the command that needs it."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence

from colossus import __version__
from colossus.checkpoint.errors import CheckpointError
from colossus.cli import checkpoint, compare_parser, evaluate_parser, generate_parser
from colossus.cli.named_run import path_of
from colossus.cli.parsers import COMMANDS, EXIT_CODES, SUMMARY, make_parser
from colossus.cli.show import join_pictures, render, render_timeline
from colossus.config import Config, ConfigError, as_dict, as_source, load_config
from colossus.registry import nearest


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code: 0 done, 1 failed at run time, 2 wrong config or usage, 3 differs.

    A run that a signal has stopped ends with 128 and the signal's number.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    if not given or given[0] in ("-h", "--help", "help"):
        print(SUMMARY + EXIT_CODES, end="", file=sys.stdout if given else sys.stderr)
        return 0 if given else 2
    if given[0] == "--version":
        print(f"colossus {__version__}")
        return 0
    command = given[0]
    if command not in COMMANDS:
        close = nearest(command, list(COMMANDS))
        hint = f"; did you mean {close}?" if close else ";"
        if command.endswith(".py"):
            hint = f"; did you mean colossus launch {command}?"
        print(f"colossus: no command {command!r}{hint} commands: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    if command == "checkpoint":
        return _stoppable(lambda: checkpoint.run(given[1:]))
    try:
        rest = join_pictures(given[1:]) if command == "show" else given[1:]
        own = {"generate": generate_parser, "evaluate": evaluate_parser, "compare": compare_parser}
        parser = own[command].make_parser() if command in own else make_parser(command)
        arguments = parser.parse_intermixed_args(rest)
    except SystemExit as stop:
        return int(stop.code or 0)
    handlers = {
        "config": _config,
        "show": _show,
        "launch": _launch,
        "doctor": _doctor,
        "verify": _verify,
        "compare": _compare,
        "generate": _generate,
        "evaluate": _evaluate,
    }
    return _stoppable(lambda: handlers[command](arguments))


def _stoppable(run: Callable[[], int]) -> int:
    """Run a command; its exit code, also where a config is wrong, or where it is stopped from outside."""
    try:
        return run()
    except (ConfigError, CheckpointError) as error:
        print(f"colossus: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # a launch that has begun and its ranks listen for signals themselves
        print("colossus: stopped by Ctrl-C", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) has gone; nothing is left to say, also not at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _config(arguments: argparse.Namespace) -> int:
    config = _load(arguments)
    print(json.dumps(as_dict(config), indent=2) if arguments.json else as_source(config).rstrip())
    return 0


def _show(arguments: argparse.Namespace) -> int:
    config = _load(arguments)
    if arguments.graph:
        graphs = importlib.import_module("colossus.cli.show_graph")  # numpy takes its time
        print(graphs.render_graph(config))
    elif arguments.strategy:
        parameters = importlib.import_module("colossus.cli.show_strategy")  # torch takes its time
        print(parameters.render_strategy(config, shutil.get_terminal_size((100, 24)).columns))
    elif arguments.timeline is None:
        print(render(config, every_rank=arguments.all))
    else:
        print(render_timeline(config, shutil.get_terminal_size((100, 24)).columns, arguments.timeline))
    return 0


def _launch(arguments: argparse.Namespace) -> int:
    # It checks the config itself, before it imports torch: under torchrun and srun only rank 0 tells what is wrong.
    command = importlib.import_module("colossus.launch.command")
    code: int = command.run(
        arguments.file,
        arguments.overrides,
        nproc=arguments.nproc,
        run_dir=arguments.run_dir,
        nnodes=arguments.nnodes,
        rdzv_endpoint=arguments.rdzv_endpoint,
        resume=arguments.resume,
        dry_run=arguments.dry_run,
    )
    return code


def _doctor(arguments: argparse.Namespace) -> int:
    code: int = importlib.import_module("colossus.doctor.command").run(nproc=arguments.nproc, json=arguments.json)
    return code


def _verify(arguments: argparse.Namespace) -> int:
    command = importlib.import_module("colossus.verify.command")
    code: int = command.run(
        arguments.file,
        arguments.overrides,
        nproc=arguments.nproc,
        steps=arguments.steps,
        tolerance=arguments.tolerance,
    )
    return code


def _compare(arguments: argparse.Namespace) -> int:
    command = importlib.import_module("colossus.compare.command")
    code: int = command.run(
        arguments.file,
        arguments.overrides,
        strategies=arguments.strategies,
        plans=arguments.plans,
        num_seeds=arguments.seeds,
        nproc=arguments.nproc,
        out=arguments.out,
        plot=arguments.plot,
        dry_run=arguments.dry_run,
    )
    return code


def _generate(arguments: argparse.Namespace) -> int:
    command = importlib.import_module("colossus.inference.command")
    code: int = command.generate(
        path_of(arguments.checkpoint),
        arguments.overrides,
        prompts=arguments.prompt,
        tokens=arguments.tokens,
        max_tokens=arguments.max_tokens,
        tokenizer=arguments.tokenizer,
        config_file=arguments.config,
        json=arguments.json,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        greedy=arguments.greedy,
        seed=arguments.seed,
    )
    return code


def _evaluate(arguments: argparse.Namespace) -> int:
    command = importlib.import_module("colossus.inference.command")
    code: int = command.evaluate(
        path_of(arguments.checkpoint),
        arguments.overrides,
        config_file=arguments.config,
        split=arguments.split,
        nproc=arguments.nproc,
        json=arguments.json,
    )
    return code


def _load(arguments: argparse.Namespace) -> Config:
    return load_config(arguments.file, arguments.overrides, arguments.nproc or _world_size())


def _world_size() -> int | None:
    """Number of processes when torchrun has started us, else None."""
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdecimal() and int(text) else None
