"""``colossus verify``: compare a run under a plan with the same run in one process, or two records of any loops."""

from __future__ import annotations

import argparse
from pathlib import Path

from colossus.cli.parser import OVERRIDES, Parser, call, number_argument


def make_parser() -> Parser:
    parser = Parser(
        "colossus verify",
        "Train the model of a config file for a few steps twice, with the same seed and samples, in float64: in one\n"
        "process without parallelism, and under the plan of the file. Print that the two agree, with the largest\n"
        "difference, or name the first thing that differs: an initial value, a sample, the output of a module, the\n"
        "loss, the gradient of a parameter, the gradient norm, a weight after a step.\n\n"
        "With two folders: compare two records that colossus.verify.record wrote of training loops in any framework.\n"
        "The first is in question, the second is taken as right. What differs by more than rounding explains is\n"
        "named, with the cause where the numbers tell it (docs/is-my-training-right.md).",
        OVERRIDES
        + "\nexamples:\n  colossus verify config.py                                      # the plan of the file\n"
        "  colossus verify config.py parallel.data=2 parallel.tensor=2   # another one\n"
        "  colossus verify config.py parallel.tensor.mode=2d parallel.tensor.size=4 parallel.data=1\n"
        "  colossus verify config.py model.num_layers=2 train.global_batch_size=8 --steps 1   # small, so quick\n"
        "  colossus verify four-ranks.verify one-process.verify                 # two records\n\n"
        "The model must fit into one process in float64: verify a small one (fewer layers, a smaller batch), which\n"
        "runs the same code. torch.nn.Dropout and F.dropout are off in both runs; colossus.layers.Dropout drops the\n"
        "same elements in both. The optimizer is that of the file; weights whose gradient is rounding noise are not\n"
        "compared after its steps. Hooks of the file do not run.\n\n"
        "exit codes: 0 they agree, 1 failed at run time, 2 wrong config or usage, 3 they differ,\n"
        "            130 stopped by Ctrl-C\n",
    )
    parser.add_path("file", "FILE", "config file (Python), or a record (a folder)")
    parser.add_overrides("override of a key of the file; or the record that is taken as right")
    parser.add_nproc("processes of the plan (default: the product of the sizes)")
    parser.add_count("--steps", "steps of each run", 3)
    parser.add_argument(
        "--tolerance",
        type=number_argument("a number above zero", lambda value: value > 0),
        metavar="T",
        help="allowed relative difference (default: 1e-9; of records, what rounding in their dtype explains)",
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    if Path(arguments.file).is_dir():
        records = argparse.Namespace(run=arguments.file, others=arguments.overrides, tolerance=arguments.tolerance)
        return call("colossus.verify.record_report", "run", records)
    return call("colossus.verify.run_verify", "run", arguments, "file", "overrides")
