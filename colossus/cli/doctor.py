"""``colossus doctor``: the devices of this machine, their speed, and problems that a run will have on it."""

from __future__ import annotations

import argparse

from colossus.cli.parser import EXIT_CODES, Parser, call


def make_parser() -> Parser:
    parser = Parser(
        "colossus doctor",
        "Print versions, devices (memory, driver, peer access), backend, cores, the environment variables of NCCL and\n"
        "CUDA, latency and bandwidth between ranks, and warn of problems that a run will have here.",
        EXIT_CODES,
    )
    parser.add_nproc("ranks to measure between (default: 2)", default=2)
    help_text = (
        "instead, time matmuls, attention, memory, collectives and training steps with all ranks at once, in less than "
        "a minute; print tables, and write them to OUT.json"
    )
    parser.add_path("--measure", "OUT.json", help_text, nargs="?", const="")
    return parser


def run(arguments: argparse.Namespace) -> int:
    if arguments.measure is not None:
        return call("colossus.doctor.measure", "run", arguments)
    del arguments.measure
    return call("colossus.doctor.examine", "run", arguments)
