"""``colossus data``: prepare the documents of a config, and print the rows that a model sees."""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from colossus.cli.parser import OVERRIDES, Parser, load
from colossus.config import ConfigError
from colossus.config.errors import as_config_errors

ACTIONS = ("prepare", "show")


def make_parser() -> Parser:
    parser = Parser(
        "colossus data",
        "Prepare the documents of a config's data, or print its training data.\n"
        "  prepare  encode documents into memory-mapped files in the cache of the user\n"
        "           ($XDG_CACHE_HOME/colossus/documents), where runs find them. What was prepared before is not done\n"
        "           again; a preparation that was stopped goes on with the pieces that it lacks\n"
        "  show     print what the data is made of as a tree, with counts and fingerprints, and rows: each document\n"
        "           in a colour of its own, tokens that are no label dim. Without colours a bar begins a document,\n"
        "           and brackets enclose tokens that are no label",
        OVERRIDES + "\nexamples:\n  colossus data prepare config.py --processes 8\n"
        "  colossus data show config.py --rows 3 --from 100\n",
    )
    parser.add_argument("action", choices=ACTIONS, metavar="prepare|show", help="what to do")
    parser.add_file()
    parser.add_count("--processes", "prepare: processes that encode (default: all cores)")
    parser.add_count("--rows", "show: rows", 1)
    parser.add_argument("--from", type=int, default=0, dest="first", metavar="K", help="show: the first (default 0)")
    parser.set_defaults(nproc=None)
    return parser


def run(arguments: argparse.Namespace) -> int:
    config = load(arguments)
    if config.data is None:
        raise ConfigError("data: the config has none", config.source)
    shown = importlib.import_module("colossus.cli.show_data")  # imports torch, which is slow
    with as_config_errors("data", config.source):
        if arguments.action == "prepare":
            print("\n".join(shown.prepare(config, arguments.processes or os.cpu_count() or 1)))
            return 0
        for line in shown.render_data(config, arguments.first, arguments.rows, in_colour=sys.stdout.isatty()):
            print(line)
    return 0
