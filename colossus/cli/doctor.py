"""``colossus doctor``: what this machine has, and what will make trouble."""

from __future__ import annotations

import argparse

from colossus.cli.parser import EXIT_CODES, Parser, call


def make_parser() -> Parser:
    parser = Parser(
        "colossus doctor",
        "Print versions, devices (memory, driver, which of them reach each other), backend, cores, the variables of\n"
        "NCCL and CUDA that are set, latency and bandwidth between ranks, and what of all this will make trouble.",
        EXIT_CODES,
    )
    parser.add_nproc("ranks to measure between (default: 2)", default=2)
    return parser


def run(arguments: argparse.Namespace) -> int:
    return call("colossus.doctor.examine", "run", arguments)
