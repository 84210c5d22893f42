"""``colossus config``: print the resolved config, or the meaning of a key."""

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
        "Print the resolved config: every key, with defaults and overrides. The output is a config file itself,\n"
        "unless the model or data is an object. No process is started.",
        OVERRIDES + "\nexamples:\n  colossus config configs/gpt_stdlib.py parallel.tensor=2 --nproc 8\n"
        "  colossus config configs/gpt_stdlib.py --help parallel.tensor      # the meaning of these keys\n",
    )
    parser.add_file()
    parser.add_nproc("processes of the run (default: WORLD_SIZE under torchrun, else the product of the sizes)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--key", metavar="KEY", help="print the meaning of a key and those below it; short: --help KEY")
    return parser


def run(arguments: argparse.Namespace) -> int:
    config = load(arguments)
    if arguments.key is not None:
        print(key_help(arguments.key, config))
    else:
        print(json.dumps(as_dict(config), indent=2) if arguments.json else as_source(config).rstrip())
        if config.optimizer.has_groups and not arguments.json:  # builds the model, which needs torch
            built = importlib.import_module("colossus.launch.checks").check_model(config)
            for line in built.group_rules if built is not None else ():
                print(f"# {line}")
    return 0
