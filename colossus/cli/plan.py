"""``colossus plan``: the best plans for a model and devices, predicted; no process is started."""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from colossus.arithmetic import counted, parse_bytes
from colossus.cli.parser import EXIT_CODES, OVERRIDES, Parser, path_argument, positive_integer, size_argument
from colossus.cli.plan_explain import in_milliseconds, render_plan, timeline_title
from colossus.cli.plan_hardware import MOST_MEASURED, choose_hardware, network_argument
from colossus.cli.plan_json import as_json
from colossus.cli.plan_picture import save_plan, save_plans
from colossus.cli.plan_table import Question, nothing_fits, render_table
from colossus.config import Config, ConfigError, load_config
from colossus.config.overrides import apply_overrides
from colossus.config.plans import resolve_sizes, world_size
from colossus.hardware.named_hardware import default_hosts
from colossus.launch.auto_plan import left_open
from colossus.launch.checks import check_given
from colossus.picture import FORMATS, check_picture
from colossus.planner.kept import SECTIONS, Kept
from colossus.planner.search_result import SearchResult

#: exit code where a check differs, as of verify
DIFFERS = 3
_EPILOG = f"""\
examples:
  colossus plan configs/gpt_stdlib.py --devices 4                         # on this machine, which is measured first
  colossus plan config.py --devices 512 --hardware h100                   # on 64 hosts of 8, by the data sheet
  colossus plan config.py --devices 64 --hosts 16 --hardware a100 --network 10us,25GB/s --memory 70GB
  colossus plan config.py --devices 64 --hardware h100 --keep pipeline=2 schedule.type=1f1b
  colossus plan config.py --devices 8 --hardware measured.json --explain 2 --plot plan.svg

The plan of the file counts for nothing but for what --keep names; all else of the file stays. Every product of data,
pipeline, tensor, sequence and expert sizes, their modes, schedules, ZeRO and activation checkpointing that fits
model, batch and memory is compared.

--hardware h100, h200, h800, b200, a100, v100 and mi300x are data sheets with round efficiencies: good to compare
plans, not to promise times. A file that `colossus doctor --measure OUT.json` has written on such a device is better.
cpu measures this machine with as many ranks at once, {MOST_MEASURED} at most, in half a minute or less.

{OVERRIDES}
{EXIT_CODES}"""


def make_parser() -> Parser:
    parser = Parser(
        "colossus plan",
        "Find the plans that train a model fastest on so many devices, and predict of each the time of a step, its\n"
        "parts, memory, and what is sent. Nothing is launched, and no GPU is needed. Prints the command that runs the\n"
        "best plan. With --explain N, one plan of the list: its timeline, memory, hosts, and why it beats the\n"
        "next. With --check N, ranks of a plan run a step of the real engine on tensors without values, and what they\n"
        "send and hold is put beside the prediction. Ctrl-C ends the search and prints the best plans so far.",
        _EPILOG,
    )
    parser.add_file()
    parser.add_argument(
        "--devices", type=positive_integer, metavar="N", help="of the run (default: those of the file's own plan)"
    )
    parser.add_argument(
        "--hosts",
        type=positive_integer,
        metavar="N",
        help="that share the devices evenly (default: as few as have at most 8 each; one of CPUs)",
    )
    parser.add_argument("--memory", type=size_argument, metavar="SIZE", help="of a device (default: the hardware's)")
    parser.add_argument(
        "--hardware", metavar="NAME", help="a data sheet, a file of measured times (.json), or cpu (default: this "
        "machine's GPU by its data sheet; without one, cpu)",
    )  # fmt: skip
    parser.add_argument(
        "--network", type=network_argument, metavar="LATENCY,BANDWIDTH", help="between hosts, of each device: "
        "10us,50GB/s (default: that of DGX H100 for data sheets, not known for measured hardware)",
    )  # fmt: skip
    parser.add_argument(
        "--keep", metavar="key=value", nargs="+", action="extend", default=[], help="what every plan has: pipeline=2, "
        "tensor.mode=1d, schedule.type=1f1b ..",
    )  # fmt: skip
    parser.add_argument("--top", type=positive_integer, metavar="N", default=10, help="plans of the list (default: 10)")
    parser.add_argument(
        "--explain", type=positive_integer, metavar="N", nargs="?", const=1, help="the N-th plan (default: the best)"
    )
    parser.add_argument(
        "--check", type=positive_integer, metavar="N", nargs="?", const=1, help="count what ranks of the N-th plan "
        "(default: the best) send and hold, beside the prediction",
    )  # fmt: skip
    parser.add_argument(
        "--json", type=path_argument, metavar="OUT", help="all numbers, in seconds and bytes; - prints them instead"
    )
    parser.add_argument("--plot", type=path_argument, metavar="OUT", help=f"a picture, too ({', '.join(FORMATS)})")
    return parser


def run(arguments: argparse.Namespace) -> int:
    question = _asked(arguments)
    result, code = _searched(question, arguments)
    width = max(60, shutil.get_terminal_size((100, 24)).columns)
    if not result.plans:
        raise nothing_fits(question, result, width)
    explained = _place("explain", arguments, len(result.plans))
    checked = _place("check", arguments, len(result.plans))
    found = as_json(question, result, explained)
    if arguments.json != "-":
        encoding = sys.stdout.encoding or "ascii"
        print(
            render_table(question, result, width)
            if explained is None
            else render_plan(question, result.plans, explained, width, encoding),
            flush=True,
        )
    if checked is not None:
        plan = result.plans[checked]
        report = importlib.import_module("colossus.planner.plan_check").check(plan.config, plan)
        found["plans"][checked]["check"] = report.as_json()
        code = code or (0 if report.is_equal else DIFFERS)
        if arguments.json != "-":
            print(f"\nplan {checked + 1}\n{report.render()}")
    if arguments.json == "-":
        print(json.dumps(found, indent=1))
    elif arguments.json:
        _write("json", lambda: Path(arguments.json).write_text(json.dumps(found, indent=1) + "\n"))
    if arguments.plot:
        _write("plot", lambda: _save(question, result, explained, Path(arguments.plot)))
    return code


def _write(option: str, write: Callable[[], object]) -> None:
    """Write the file that an option names."""
    try:
        write()
    except OSError as error:
        raise ConfigError(f"--{option}: {error}") from error


def _save(question: Question, result: SearchResult, explained: int | None, path: Path) -> None:
    if explained is None:
        save_plans(question, result.plans, path)
    else:
        plan = result.plans[explained]
        save_plan(question, plan, in_milliseconds(plan), timeline_title(plan), path)


def _place(option: str, arguments: argparse.Namespace, number: int) -> int | None:
    """Of the plan that an option names, from 0; None where it is not given."""
    given: int | None = getattr(arguments, option)
    if given is not None and given > number:
        more = "; --top takes more" if number == arguments.top else ""
        raise ConfigError(f"--{option} {given}: the list has {counted(number, 'plan')}{more}")
    return None if given is None else given - 1


def _asked(arguments: argparse.Namespace) -> Question:
    """What the command line asks, checked before anything is searched; without torch, if the hardware is named."""
    for option in ("explain", "check"):
        _place(option, arguments, arguments.top)
    if arguments.json not in (None, "-") and not Path(arguments.json).absolute().parent.is_dir():
        raise ConfigError(f"--json {arguments.json}: there is no folder {Path(arguments.json).parent}")
    if arguments.plot:
        try:
            check_picture(Path(arguments.plot))
        except ValueError as error:
            raise ConfigError(f"--plot: {error}") from None
    kept: dict[str, Any] = {}

    def leave_open(config: Config) -> Config:
        """Of a file with parallel.auto, what that says counts where the command line says nothing."""
        auto, (opened, given) = config.parallel.auto, left_open(config)
        if auto is None:
            return opened if arguments.devices is None else _fitting(opened)
        kept.update(given)
        arguments.hardware = arguments.hardware or auto.hardware
        arguments.memory = arguments.memory or (auto.memory and parse_bytes(auto.memory))
        return opened

    config = load_config(arguments.file, arguments.overrides, choose=leave_open)
    check_given(config)
    sections = {word: word.partition("=")[0].partition(".")[0] for word in arguments.keep}
    words = [word if name in SECTIONS else f"parallel.{word}" for word, name in sections.items()]
    keep = kept | apply_overrides({}, words)
    Kept.of(config, keep)  # refuses what is wrong before anything is measured
    devices = arguments.devices or world_size(config.parallel)
    if arguments.hosts and devices % arguments.hosts:
        raise ConfigError(
            f"--hosts {arguments.hosts}: {counted(devices, 'device')} cannot be spread evenly over "
            f"{counted(arguments.hosts, 'host')}; every host has as many"
        )
    hardware = choose_hardware(arguments.hardware, arguments.network, devices, config.train.precision.compute)
    hosts, memory = arguments.hosts or default_hosts(hardware, devices), arguments.memory or hardware.memory_bytes
    return Question(arguments.file, tuple(arguments.overrides), config, hardware, devices, hosts, memory, keep)


def _fitting(config: Config) -> Config:
    """A config whose own plan, which counts for nothing, fits neither the model nor the batch, without that plan."""
    try:
        return resolve_sizes(config)
    except ConfigError:
        own = config.parallel
        parallel = type(own)(strategy=own.strategy, rank_order=own.rank_order)
        return config.model_copy(update={"parallel": parallel, "schedule": type(config.schedule)()})


def _searched(question: Question, arguments: argparse.Namespace) -> tuple[SearchResult, int]:
    """What was found, and the exit code: that of Ctrl-C where it has ended the search."""
    search = importlib.import_module("colossus.planner.search").search  # torch takes its time
    try:
        result: SearchResult = search(
            question.config,
            question.hardware,
            devices=question.devices,
            hosts=question.hosts,
            memory=question.memory,
            top=arguments.top,
            keep=question.keep,
        )
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error), question.config.source) from error
    if not result.stopped:
        return result, 0
    if not result.plans:
        raise KeyboardInterrupt
    print(f"stopped by Ctrl-C after {counted(result.tried, 'plan')}", file=sys.stderr)
    return result, 128 + signal.SIGINT
