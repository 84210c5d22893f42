"""``colossus verify``: compare a run under a plan with the same run in one process."""

from __future__ import annotations

import argparse

from colossus.cli.parser import OVERRIDES, Parser, call, number_argument, positive_integer


def make_parser() -> Parser:
    parser = Parser(
        "colossus verify",
        "Train the model of a config file for a few steps twice, with the same seed and samples, in float64: in one\n"
        "process without parallelism, and under the plan of the file. Print that the two agree, with the largest\n"
        "difference, or name the first thing that differs: an initial value, a sample, the output of a module, the\n"
        "loss, the gradient of a parameter, the gradient norm, a weight after a step.",
        OVERRIDES
        + "\nexamples:\n  colossus verify config.py                                      # the plan of the file\n"
        "  colossus verify config.py parallel.data=2 parallel.tensor=2   # another one\n"
        "  colossus verify config.py parallel.tensor.mode=2d parallel.tensor.size=4 parallel.data=1\n"
        "  colossus verify config.py model.num_layers=2 train.global_batch_size=8 --steps 1   # small, so quick\n\n"
        "The model must fit into one process in float64: verify a small one (fewer layers, a smaller batch), which\n"
        "runs the same code. torch.nn.Dropout and F.dropout are off in both runs; colossus.layers.Dropout drops the\n"
        "same elements in both. The optimizer is that of the file; weights whose gradient is rounding noise are not\n"
        "compared after its steps. Hooks of the file do not run.\n\n"
        "exit codes: 0 they agree, 1 failed at run time, 2 wrong config or usage, 3 they differ,\n"
        "            130 stopped by Ctrl-C\n",
    )
    parser.add_file()
    parser.add_nproc("processes of the plan (default: the product of the sizes)")
    parser.add_argument("--steps", type=positive_integer, default=3, metavar="K", help="steps of each run (default: 3)")
    parser.add_argument(
        "--tolerance",
        type=number_argument("a number above zero", lambda value: value > 0),
        default=1e-9,
        metavar="T",
        help="allowed relative difference (default: 1e-9)",
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    return call("colossus.verify.run_verify", "run", arguments, "file", "overrides")
