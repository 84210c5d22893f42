"""``colossus plan``: search the best plans for a model and devices, without starting a process of the run."""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from colossus.arithmetic import counted, parse_bytes
from colossus.cli.parser import EXIT_CODES, OVERRIDES, Parser, size_argument
from colossus.cli.plan_explain import render_plan
from colossus.cli.plan_hardware import MOST_MEASURED, choose_hardware, network_argument
from colossus.cli.plan_table import Question, as_json, nothing_fits, render_table
from colossus.config import Config, ConfigError, resolve, state_config
from colossus.config.errors import as_config_errors
from colossus.config.overrides import apply_overrides
from colossus.config.plans import resolve_sizes, world_size
from colossus.config.schema import Parallel
from colossus.hardware.named_hardware import default_hosts
from colossus.launch.auto_plan import left_open
from colossus.launch.checks import check_required
from colossus.planner.fixed_keys import SECTIONS, FixedKeys
from colossus.planner.plan_estimate import SearchResult

#: exit code if a check finds a difference, as for verify
DIFFERS = 3
_EPILOG = f"""\
examples:
  colossus plan configs/gpt_stdlib.py --devices 4                         # this machine, which is measured first
  colossus plan config.py --devices 512 --hardware h100                   # 64 hosts of 8, by the data sheet
  colossus plan config.py --devices 64 --hosts 16 --hardware a100 --network 10us,25GB/s --memory 70GB
  colossus plan config.py --devices 64 --hardware h100 --keep pipeline=2 schedule.type=1f1b
  colossus plan config.py --devices 8 --hardware measured.json --explain 2

The plan of the file is ignored; --keep fixes keys of the plans, all other sections of the file count. The search
compares every product of data, pipeline, tensor, sequence and expert sizes, with their modes, schedules, ZeRO and
activation checkpointing, that fits the model, the batch and the memory.

--hardware h100, h200, h800, b200, a100, v100 and mi300x are data sheets with published efficiencies. They are good for
comparing plans, not for promising times; a file that `colossus doctor --measure OUT.json` wrote on such a device is
better. cpu measures this machine with a rank for each device, {MOST_MEASURED} at most, in half a minute or less.

{OVERRIDES}
{EXIT_CODES}"""


def make_parser() -> Parser:
    parser = Parser(
        "colossus plan",
        "Find the plans that train a model fastest on a number of devices. Predict for each the time of a step and\n"
        "its parts, the memory, and the bytes sent, and print the command that runs the best plan. Nothing is\n"
        "launched, and no GPU is needed. --explain N shows one plan of the list: its timeline, memory, hosts, and why\n"
        "it beats the next. --check N runs a step of the N-th plan with the real engine on tensors without values,\n"
        "and prints the bytes that ranks send and hold beside the prediction. Ctrl-C ends the search and prints the\n"
        "best plans so far.",
        _EPILOG,
    )
    parser.add_file()
    parser.add_count("--devices", "devices of the run (default: those of the file's plan)")
    help_text = "hosts that share the devices evenly (default: the fewest with at most 8 devices each; 1 for CPUs)"
    parser.add_count("--hosts", help_text)
    parser.add_argument(
        "--memory", type=size_argument, metavar="SIZE", help="memory of a device (default: that of the hardware)"
    )
    parser.add_argument(
        "--hardware", metavar="NAME", help="a data sheet, a file of measured times (.json), or cpu (default: this "
        "machine's GPU by its data sheet; without one, cpu)",
    )  # fmt: skip
    parser.add_argument(
        "--network", type=network_argument, metavar="LATENCY,BANDWIDTH", help="link of each device to other hosts, "
        "10us,50GB/s (default: that of DGX H100 for data sheets, none for measured hardware)",
    )  # fmt: skip
    parser.add_argument(
        "--keep", metavar="key=value", nargs="+", action="extend", default=[], help="keys that every plan must have: "
        "pipeline=2, tensor.mode=1d, schedule.type=1f1b ..",
    )  # fmt: skip
    parser.add_count("--top", "number of plans in the list", 10)
    parser.add_count("--explain", "explain the N-th plan (default: 1, the best)", nargs="?", const=1)
    help_text = "compare the N-th plan (default: 1, the best) with a step of the real engine"
    parser.add_count("--check", help_text, nargs="?", const=1)
    parser.add_path("--json", "OUT", "write all numbers, in seconds and bytes; - prints them instead of the table")
    return parser


def run(arguments: argparse.Namespace) -> int:
    question = _question(arguments)
    result, code = _search(question, arguments)
    width = max(60, shutil.get_terminal_size((100, 24)).columns)
    if not result.plans:
        raise nothing_fits(question, result, width)
    explained = _place("explain", arguments, len(result.plans))
    checked = _place("check", arguments, len(result.plans))
    numbers = as_json(question, result, explained)
    if arguments.json != "-":
        print(
            render_table(question, result, width)
            if explained is None
            else render_plan(question, result.plans, explained, width),
            flush=True,
        )
    if checked is not None:
        plan = result.plans[checked]
        report = importlib.import_module("colossus.planner.plan_check").check(
            plan, hardware=question.hardware, hosts=question.hosts
        )
        numbers["plans"][checked]["check"] = report.as_json()
        code = code or (0 if report.is_equal else DIFFERS)
        if arguments.json != "-":
            print(f"\nplan {checked + 1}\n{report.render()}")
    if arguments.json == "-":
        print(json.dumps(numbers, indent=1))
    elif arguments.json:
        try:
            Path(arguments.json).write_text(json.dumps(numbers, indent=1) + "\n")
        except OSError as error:
            raise ConfigError(f"--json: {error}") from error
    return code


def _place(option: str, arguments: argparse.Namespace, number: int) -> int | None:
    """Return the index, from 0, of the plan that ``--explain`` or ``--check`` names; None without the option.

    Raises:
        ConfigError: the list has fewer plans.
    """
    place: int | None = getattr(arguments, option)
    if place is not None and place > number:
        more = "; a larger --top lists more" if number == arguments.top else ""
        raise ConfigError(f"--{option} {place}: the list has {counted(number, 'plan')}{more}")
    return None if place is None else place - 1


def _question(arguments: argparse.Namespace) -> Question:
    """Check the command line and return the question that it asks.

    This imports no torch if ``--hardware`` names a data sheet or a file.
    """
    for option in ("explain", "check"):
        _place(option, arguments, arguments.top)
    if arguments.json not in (None, "-") and not Path(arguments.json).absolute().parent.is_dir():
        raise ConfigError(f"--json {arguments.json}: the folder {Path(arguments.json).parent} does not exist")
    fixed: dict[str, Any] = {}

    def leave_open(config: Config) -> Config:
        """Return the config without a plan; ``parallel.auto`` gives defaults for the options of the command line."""
        auto, (opened, keys) = config.parallel.auto, left_open(config)
        if auto is None:
            return opened if arguments.devices is None else _without_unfit_plan(opened)
        fixed.update(keys)
        arguments.hardware = arguments.hardware or auto.hardware
        arguments.memory = arguments.memory or (auto.memory and parse_bytes(auto.memory))
        return opened

    words = [word for word in arguments.keep if not _is_override(word)]
    overrides = [*arguments.overrides, *(word for word in arguments.keep if _is_override(word))]
    config = resolve(state_config(arguments.file, overrides), choose=leave_open)
    check_required(config)
    sections = {word: word.partition("=")[0].partition(".")[0] for word in words}
    keep = fixed | apply_overrides(
        {}, [word if name in SECTIONS else f"parallel.{word}" for word, name in sections.items()]
    )
    FixedKeys.of(config, keep)  # raises for a wrong key before the hardware is measured
    devices = arguments.devices or world_size(config.parallel)
    if arguments.hosts and devices % arguments.hosts:
        raise ConfigError(
            f"--hosts {arguments.hosts}: {counted(devices, 'device')} cannot be spread evenly over "
            f"{counted(arguments.hosts, 'host')}; choose hosts that divide the devices"
        )
    hardware = choose_hardware(arguments.hardware, arguments.network, devices, config.train.precision.compute)
    hosts, memory = arguments.hosts or default_hosts(hardware, devices), arguments.memory or hardware.memory_bytes
    return Question(arguments.file, tuple(overrides), config, hardware, devices, hosts, memory, keep)


def _is_override(word: str) -> bool:
    """Return whether a word behind ``--keep`` sets a key that is no part of a plan: ``model.num_layers=2``."""
    section, _, key = word.partition("=")[0].partition(".")
    if section == "train":
        return not key.startswith("activation_checkpoint")
    return section in Config.model_fields and section not in (*SECTIONS, *Parallel.model_fields)


def _without_unfit_plan(config: Config) -> Config:
    """Return the config, without its own plan if that plan does not fit: the search ignores it anyway."""
    try:
        return resolve_sizes(config)
    except ConfigError:
        own = config.parallel
        parallel = type(own)(strategy=own.strategy, rank_order=own.rank_order)
        return config.model_copy(update={"parallel": parallel, "schedule": type(config.schedule)()})


def _search(question: Question, arguments: argparse.Namespace) -> tuple[SearchResult, int]:
    """Search the plans and return them with an exit code: 0, or that of Ctrl-C if it ended the search."""
    search = importlib.import_module("colossus.planner.search").search  # imports torch, which is slow
    with as_config_errors(source=question.config.source):
        result: SearchResult = search(
            question.config,
            question.hardware,
            devices=question.devices,
            hosts=question.hosts,
            memory=question.memory,
            top=arguments.top,
            keep=question.keep,
            usual=True,
        )
    if not result.stopped:
        return result, 0
    if not result.plans:
        raise KeyboardInterrupt
    print(f"stopped by Ctrl-C after {counted(result.tried, 'plan')}", file=sys.stderr)
    return result, 128 + signal.SIGINT
