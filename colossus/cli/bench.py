"""``colossus bench``: time the train step of a config under one or several plans, side by side."""

from __future__ import annotations

import argparse

from colossus.cli.parser import Parser, call

_EPILOG = """\
examples:
  colossus bench configs/gpt_stdlib.py                                        # the plan of the file
  colossus bench configs/gpt_stdlib.py "parallel.tensor=2 parallel.data=1" "parallel.zero=1"
  colossus bench configs/gpt_stdlib.py data=4 data=4 "data=2 tensor=2" "pipeline=2 schedule.microbatches=4"
  colossus bench config.py "" train.precision=bf16 --overrides train.global_batch_size=64 --json bench.json

A plan is one or several overrides of the file in quotes; an empty text is the plan of the file. Keys of parallel may
omit that word, as for compare; then an axis without a key has size 1.

All plans are checked before the first process starts. The processes of all plans exist at once, with their memory, on
the same devices, and take turns: a block of steps of one plan runs while the others wait, so that noise of the machine
affects all alike. The data is the config's, read before the clock starts. There are no evaluations, checkpoints or
hooks. Each rank has as many threads as a launch gives it; OMP_NUM_THREADS=1 gives it one. The ratio to the first plan
is the median of the ratios of blocks, with quartiles; naming a plan twice shows how much of the ratio is noise.

exit codes: 0 done, 1 a plan has failed (the others are printed), 2 wrong config or usage, 130 stopped by Ctrl-C
"""


def make_parser() -> Parser:
    parser = Parser(
        "colossus bench",
        "Time the train step of a config file under its plan, or under several plans side by side: median and\n"
        "quartiles of the step, the ratio to the first plan, tokens per second, MFU if the device's peak is known,\n"
        "bytes sent along each axis, memory of the fullest rank.",
        _EPILOG,
    )
    parser.add_path("file", "FILE", "config file (Python)")
    parser.add_argument("plans", metavar="PLAN", nargs="*", help='"section.key=value ..", or "axis=size .."')
    parser.add_argument(
        "--overrides", metavar="section.key=value", nargs="+", default=[], help="overrides for all plans"
    )
    parser.add_count("--warmup", "steps before the first block", 3)
    parser.add_count("--steps", "steps of a block", 5)
    parser.add_count("--blocks", "blocks of each plan", 6)
    help_text = "write the times of all blocks as JSON; without FILE, print them instead of the table"
    parser.add_path("--json", "FILE", help_text, nargs="?", const="-")
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, print what would be timed, start nothing"
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    return call("colossus.compare.run_bench", "run", arguments, "file", "plans")
