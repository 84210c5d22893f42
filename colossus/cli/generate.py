"""``colossus generate``: continue text with the model of a checkpoint."""

from __future__ import annotations

import argparse

from colossus.cli.parser import CHECKPOINT, Parser, call, path_of, positive_integer

_EPILOG = """\
examples:
  colossus generate gpt_stdlib --prompt "def main("    # the newest checkpoint of the newest run of that name
  colossus generate runs/try/checkpoints/step-00000300 --prompt "import " --greedy --max-tokens 64
  colossus generate runs/try --prompt "class A" --prompt "class B" --temperature 0.8 --top-k 40 --top-p 0.95
  echo "for i in" | colossus generate runs/try parallel.tensor=2
  colossus generate runs/try --tokens 1,2,3            # without a tokenizer: ids in, ids out
  colossus generate path/to/llama --prompt "Once"      # a folder of Hugging Face

The plan is one process, whatever the plan of the training run; overrides change it (parallel.tensor=2, device=cpu).
The text is the same under every plan, up to rounding. Without a prompt, standard input is read. A text ends after
--max-tokens tokens, at a token that ends texts (eos_token_id), or when a model has no more learned positions. An empty
prompt begins with the bos_token_id of the tokenizer; bytes have none, so an empty prompt is refused. A model class of
your own is taken from --config FILE, and never imported because a checkpoint names it.

exit codes: 0 done, 1 failed at run time or a damaged checkpoint, 2 wrong usage, 130 stopped by Ctrl-C (the text so far
            is printed)
"""


def make_parser() -> Parser:
    parser = Parser(
        "colossus generate",
        "Continue text with the model of a checkpoint, of a run, of a folder of checkpoints (the newest), or of\n"
        "Hugging Face. The text goes to standard output token by token; speed and plan go to standard error.",
        _EPILOG,
    )
    parser.add_path("checkpoint", "CHECKPOINT", f"{CHECKPOINT}, or a folder of Hugging Face")
    parser.add_overrides("overrides of the plan, the precision, the device")
    prompts = parser.add_argument_group("prompts")
    help_text = "a text to continue; may be repeated; - is standard input"
    prompts.add_argument("--prompt", metavar="TEXT", dest="prompts", action="append", default=[], help=help_text)
    help_text = "a prompt as token ids; may be repeated"
    prompts.add_argument("--tokens", metavar="1,2,3", action="append", default=[], type=_ids, help=help_text)
    help_text = "bytes for UTF-8, or a tokenizer.json (default: the tokenizer that the checkpoint records)"
    prompts.add_argument("--tokenizer", metavar="bytes|PATH", help=help_text)
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--max-tokens", type=positive_integer, default=256, metavar="N", help="tokens to generate (default: 256)"
    )
    sampling.add_argument("--greedy", action="store_true", help="always take the most probable token")
    help_text = "below 1, probable tokens become more probable (default: 1)"
    sampling.add_argument("--temperature", type=float, default=1.0, metavar="T", help=help_text)
    sampling.add_argument(
        "--top-k", type=int, metavar="K", help="sample from the K most probable tokens (default: all)"
    )
    help_text = "sample from the most probable tokens whose probabilities sum to P (default: 1, all)"
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P", help=help_text)
    sampling.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the random numbers (default: 0)")
    parser.add_average()
    help_text = "a config file with the model, if that is a class of yours"
    parser.add_path("--config", "FILE", help_text, dest="config_file")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead of the text")
    return parser


def _ids(text: str) -> list[int]:
    try:
        ids = [int(part) for part in text.split(",")]
    except ValueError:
        ids = [-1]
    if min(ids) < 0:
        raise argparse.ArgumentTypeError(f"must be token ids with commas between them (1,2,3), got {text!r}")
    return ids


def run(arguments: argparse.Namespace) -> int:
    arguments.checkpoint = path_of(arguments.checkpoint)
    return call("colossus.inference.run_inference", "generate", arguments, "checkpoint", "overrides")
