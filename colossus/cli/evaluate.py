"""``colossus evaluate``: the loss of a checkpoint on data."""

from __future__ import annotations

import argparse

from colossus.cli.parser import WHAT, Parser, call, path_argument, path_of

_EPILOG = """\
examples:
  colossus evaluate gpt_stdlib                          # the newest checkpoint of the newest run of that name
  colossus evaluate runs/try/checkpoints/step-00000300 train.eval_batches=10 --nproc 1
  colossus evaluate runs/try parallel.tensor=2 --split train --json
  colossus evaluate runs/try data.type=TextFolder data.path=books                     # what it holds out of books
  colossus evaluate path/to/llama data.type=TextFolder data.path=books train.global_batch_size=8 model.seq_len=1024
  colossus evaluate runs/mine --config mine.py          # where the model or the data is a class of yours
  colossus evaluate runs/try --weights ema              # the average that the hook EMA has kept

The plan is that of the run, on this machine; overrides, which win over what the checkpoint records, change it. All of
the data is evaluated, where a run evaluates train.eval_batches batches of it: over as many, under the same plan, the
loss is to the last bit the one that the run has reported after that step. Perplexity is exp(loss), of a language model
whose loss is plain. A class or an object that the checkpoint names is never imported: --config FILE has it. Text
becomes tokens by the tokenizer that the checkpoint holds; data.tokenizer=PATH, or bytes, names another.

exit codes: 0 done, 1 failed at run time or a damaged checkpoint, 2 wrong usage, no data, or a plan that does not fit,
            130 stopped by Ctrl-C
"""


def make_parser() -> Parser:
    parser = Parser(
        "colossus evaluate",
        "Print the loss of a checkpoint's model on the validation data of its run, or on other data: with perplexity,\n"
        "and what the model measures itself (accuracy). Everything is checked before a process starts.",
        _EPILOG,
    )
    parser.add_argument(
        "checkpoint", type=path_argument, metavar="CHECKPOINT", help=f"{WHAT}, or a folder of Hugging Face"
    )
    parser.add_overrides("of the data, the plan, the precision, ...")
    parser.add_argument(
        "--split", choices=("validation", "train"), default="validation", help="the data (default: validation)"
    )
    parser.add_average()
    parser.add_argument(
        "--config",
        type=path_argument,
        metavar="FILE",
        dest="config_file",
        help="a config file in the place of what the checkpoint records",
    )
    parser.add_nproc(
        "processes (default: those of the plan); 1 leaves the plan out, another number changes parallel.data"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(arguments: argparse.Namespace) -> int:
    arguments.checkpoint = path_of(arguments.checkpoint)
    return call("colossus.inference.run_inference", "evaluate", arguments, "checkpoint", "overrides")
