"""``colossus doctor``: what this machine has, what it does, and what will make trouble."""

from __future__ import annotations

import argparse

from colossus.cli.parser import EXIT_CODES, Parser, call, path_argument


def make_parser() -> Parser:
    parser = Parser(
        "colossus doctor",
        "Print versions, devices (memory, driver, which of them reach each other), backend, cores, the variables of\n"
        "NCCL and CUDA that are set, latency and bandwidth between ranks, and what of all this will make trouble.",
        EXIT_CODES,
    )
    parser.add_nproc("ranks to measure between (default: 2)", default=2)
    parser.add_argument(
        "--measure",
        type=path_argument,
        metavar="OUT.json",
        nargs="?",
        const="",
        help="time matmuls, attention, memory and collectives with all ranks at once instead, in less than a minute; "
        "print tables and write them to a file",
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    if arguments.measure is not None:
        return call("colossus.doctor.measure", "run", arguments)
    del arguments.measure
    return call("colossus.doctor.examine", "run", arguments)
