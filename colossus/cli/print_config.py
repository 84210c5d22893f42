"""``colossus config``: the resolved config, or what a key of it means."""

from __future__ import annotations

import argparse
import importlib
import json

from colossus.cli.parser import OVERRIDES, Parser, load
from colossus.config import as_dict, as_source
from colossus.config.printed import key_help


def make_parser() -> Parser:
    parser = Parser(
        "colossus config",
        "Print the resolved config: every key, with defaults and overrides. The output is a config file again,\n"
        "unless the model or data is an object. Nothing is started.",
        OVERRIDES + "\nexamples:\n  colossus config configs/gpt_stdlib.py parallel.tensor=2 --nproc 8\n"
        "  colossus config configs/gpt_stdlib.py --help parallel.tensor      # what these keys mean\n",
    )
    parser.add_file()
    parser.add_nproc("processes of the run (default: WORLD_SIZE under torchrun, else the product of the sizes)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--key", metavar="KEY", help="print what a key and those below it mean; short: --help KEY")
    return parser


def run(arguments: argparse.Namespace) -> int:
    config = load(arguments)
    if arguments.key is not None:
        print(key_help(arguments.key, config))
    else:
        print(json.dumps(as_dict(config), indent=2) if arguments.json else as_source(config).rstrip())
        if config.optimizer.has_groups and not arguments.json:  # the model is built: torch takes its time
            built = importlib.import_module("colossus.launch.checks").check_model(config)
            for line in built.group_rules if built is not None else ():
                print(f"# {line}")
    return 0
