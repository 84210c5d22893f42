"""``colossus evaluate``: the loss of a checkpoint on data."""

from __future__ import annotations

import argparse

from colossus.cli.parser import CHECKPOINT, Parser, call, path_of

_EPILOG = """\
examples:
  colossus evaluate gpt_stdlib                          # the newest checkpoint of the newest run of that name
  colossus evaluate runs/try/checkpoints/step-00000300 train.eval_batches=10 --nproc 1
  colossus evaluate runs/try parallel.tensor=2 --split train --json
  colossus evaluate runs/try data.type=TextFolder data.path=books                     # the held-out part of books
  colossus evaluate path/to/llama data.type=TextFolder data.path=books train.global_batch_size=8 model.seq_len=1024
  colossus evaluate runs/mine --config mine.py          # if the model or the data is a class of yours
  colossus evaluate runs/try --weights ema              # the average that the hook EMA kept
  colossus evaluate models/llama --tasks arc_easy,hellaswag --limit 100 parallel.tensor=2    # of lm-eval

The plan is that of the run, on this machine. Overrides win over the config in the checkpoint. All of the data is
evaluated; a run evaluates train.eval_batches batches of it. With the same batches and the same plan the loss is to the
last bit the one that the run reported after that step. Perplexity is exp(loss), for a language model with a plain
loss. A class or an object that the checkpoint names is never imported: --config FILE provides it. The tokenizer is
that of the checkpoint; data.tokenizer=PATH, or bytes, names another.

exit codes: 0 done, 1 failed at run time or a damaged checkpoint, 2 wrong usage, no data, or a plan that does not fit,
            130 stopped by Ctrl-C
"""


def make_parser() -> Parser:
    parser = Parser(
        "colossus evaluate",
        "Print the loss of a checkpoint's model on the validation data of its run, or on other data, with perplexity\n"
        "and the model's own metrics (accuracy). Everything is checked before a process starts.",
        _EPILOG,
    )
    parser.add_path("checkpoint", "CHECKPOINT", f"{CHECKPOINT}, or a folder of Hugging Face")
    parser.add_overrides("overrides of the data, the plan, the precision, ...")
    parser.add_argument(
        "--split", choices=("validation", "train"), default="validation", help="part of the data (default: validation)"
    )
    parser.add_average()
    parser.add_path("--config", "FILE", "a config file instead of the config in the checkpoint", dest="config_file")
    parser.add_nproc(
        "processes (default: those of the plan); 1 runs without a plan, another number changes parallel.data"
    )
    help_text = "tasks of EleutherAI's lm-eval harness (pip install lm_eval) in place of data: arc_easy,hellaswag"
    parser.add_argument("--tasks", metavar="NAMES", help=help_text)
    parser.add_argument("--limit", type=int, metavar="N", help="documents of each task (default: all)")
    parser.add_argument("--fewshot", type=int, metavar="N", help="examples before a question (default: the task's)")
    parser.add_argument("--tokenizer", metavar="PATH", help="of --tasks, in place of the checkpoint's; or bytes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(arguments: argparse.Namespace) -> int:
    arguments.checkpoint = path_of(arguments.checkpoint)
    return call("colossus.inference.run_inference", "evaluate", arguments, "checkpoint", "overrides")
