"""``colossus generate``: continue text with the model of a checkpoint."""

from __future__ import annotations

import argparse

from colossus.cli.parser import WHAT, Parser, call, path_argument, path_of, positive_integer

_EPILOG = """\
examples:
  colossus generate gpt_stdlib --prompt "def main("    # the newest checkpoint of the newest run of that name
  colossus generate runs/try/checkpoints/step-00000300 --prompt "import " --greedy --max-tokens 64
  colossus generate runs/try --prompt "class A" --prompt "class B" --temperature 0.8 --top-k 40 --top-p 0.95
  echo "for i in" | colossus generate runs/try parallel.tensor=2
  colossus generate runs/try --tokens 1,2,3            # without a tokenizer: numbers in, numbers out
  colossus generate path/to/llama --prompt "Once"      # a folder of Hugging Face

The plan is one process, whatever the checkpoint was trained under; overrides take more (parallel.tensor=2, device=cpu).
The text is the same under every plan, up to rounding. No prompt at all reads standard input. A text ends behind
--max-tokens, at a token that ends texts (eos_token_id), and where a model with learned positions has no more of them.
An empty prompt begins with the bos_token_id of the tokenizer; bytes have none, so it is refused. A model that was a
class of your own is taken from --config FILE, never imported because a checkpoint names it.

exit codes: 0 done, 1 failed at run time or a damaged checkpoint, 2 wrong usage, 130 stopped by Ctrl-C; what was
            generated is printed
"""


def make_parser() -> Parser:
    parser = Parser(
        "colossus generate",
        "Continue text with the model of a checkpoint, of a run, of a folder of checkpoints (the newest), or of\n"
        "Hugging Face. Text goes to standard output as it comes, facts (speed, plan) to standard error.",
        _EPILOG,
    )
    parser.add_argument(
        "checkpoint", type=path_argument, metavar="CHECKPOINT", help=f"{WHAT}, or a folder of Hugging Face"
    )
    parser.add_overrides("of the plan, the precision, the device")
    what = parser.add_argument_group("what is continued")
    what.add_argument(
        "--prompt",
        metavar="TEXT",
        dest="prompts",
        action="append",
        default=[],
        help="text; may be repeated; - is standard input",
    )
    what.add_argument(
        "--tokens", metavar="1,2,3", action="append", default=[], type=_ids, help="a prompt as numbers; may be repeated"
    )
    what.add_argument(
        "--tokenizer",
        metavar="bytes|PATH",
        help="of the text: bytes of UTF-8, or a tokenizer.json (default: what the checkpoint records)",
    )
    how = parser.add_argument_group("how")
    how.add_argument(
        "--max-tokens", type=positive_integer, default=256, metavar="N", help="tokens to make (default: 256)"
    )
    how.add_argument("--greedy", action="store_true", help="always the likeliest token")
    how.add_argument(
        "--temperature", type=float, default=1.0, metavar="T", help="below 1 likely tokens become likelier (default: 1)"
    )
    how.add_argument("--top-k", type=int, metavar="K", help="only the K likeliest tokens (default: all)")
    how.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="only the likeliest tokens that together have the probability P (default: 1, all)",
    )
    how.add_argument("--seed", type=int, default=0, metavar="S", help="of the random numbers (default: 0)")
    parser.add_average()
    parser.add_argument(
        "--config",
        type=path_argument,
        metavar="FILE",
        dest="config_file",
        help="a config file with the model, where that is a class of yours",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end, in place of text")
    return parser


def _ids(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [-1]
    if min(found) < 0:
        raise argparse.ArgumentTypeError(f"must be whole numbers with commas, 1,2,3, got {text!r}")
    return found


def run(arguments: argparse.Namespace) -> int:
    arguments.checkpoint = path_of(arguments.checkpoint)
    return call("colossus.inference.run_inference", "generate", arguments, "checkpoint", "overrides")
