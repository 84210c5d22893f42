"""``colossus compare``: the same job under several strategies or plans, in one table."""

from __future__ import annotations

import argparse

from colossus.cli.parser import OVERRIDES, Parser, call

_EPILOG = (
    OVERRIDES
    + """
examples:
  colossus compare configs/gpt_stdlib.py parallel.tensor=1 parallel.data=4 \\
      --strategies all_reduce sgp "sgp overlap=1" d-psgd ad-psgd local_sgd diloco
  colossus compare configs/gpt_stdlib.py --plans data=4 "data=2 tensor=2" "data=1 tensor=4 tensor.mode=2d"
  colossus compare config.py --strategies all_reduce sgp --seeds 3 --out runs/seeds   # means and deviations

A strategy is a name with its options, "sgp overlap=1 graph=ring". It replaces the strategy of the file. Keys of
optimizer, lr_schedule and train may follow it: "sgp optimizer.lr=4e-3". A plan is a list of keys of parallel, "data=2
tensor=4 tensor.mode=2d"; an axis that it does not name has size 1. Other overrides may follow it, "pipeline=2
schedule.microbatches=4". A plan of such overrides alone, "parallel.zero=1", changes the plan of the file. Values have
no spaces. With both options, every strategy runs under every plan. Overrides before these options count for all runs.

All runs are checked before the first starts. Each is a launch of its own, with a run folder in DIR and a file of its
output beside that folder. Ctrl-C prints the table of the runs that are done; the same command with --out DIR continues.
The table (also in DIR/compare.json) has losses after equal steps and after equal time, tokens per second of all
replicas, seconds of a step, bytes that its first rank sends, seconds that this rank waits for peers, and the distance
of the replicas at the end.

exit codes: 0 done, 1 a run has failed, 2 wrong config or usage, 130 stopped by Ctrl-C, 129 by a hang-up, 143 by SIGTERM
"""
)


def make_parser() -> Parser:
    parser = Parser(
        "colossus compare",
        "Run the same job under several data-parallel strategies or plans, one after the other, and print one table:\n"
        "loss after equal steps and after equal time, speed, bytes, waiting, distance of the replicas.",
        _EPILOG,
    )
    parser.add_file()
    parser.add_argument(
        "--strategies", metavar="TEXT", nargs="+", default=[], help='a run for each "NAME option=value .."'
    )
    parser.add_argument("--plans", metavar="TEXT", nargs="+", default=[], help='a run for each "axis=size .."')
    help_text = "repeat each run with N seeds: train.seed, train.seed + 1, .."
    parser.add_count("--seeds", help_text, 1, dest="num_seeds")
    parser.add_nproc("processes (default: the product of the plan's sizes)")
    parser.add_path("--out", "DIR", "folder of the runs (default: runs/compare-<name>-<time>)")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print what would run, start nothing")
    return parser


def run(arguments: argparse.Namespace) -> int:
    return call("colossus.compare.run_compare", "run", arguments, "file", "overrides")
