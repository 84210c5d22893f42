"""The arguments of ``colossus checkpoint inspect | verify | diff | convert``."""

from __future__ import annotations

import argparse
import sys

from colossus.cli.parser import WHAT, Parser
from colossus.registry import WEIGHT_WRITERS, nearest

COMMANDS = ("inspect", "verify", "diff", "convert")

SUMMARY = """\
usage: colossus checkpoint COMMAND DIR ...

Look at checkpoints. DIR is a checkpoint (.../step-00000100), a folder of them, a run folder, or the name of a run (the
newest of runs/NAME-*); of several the one is taken that a run would resume from. inspect, diff and convert take a model
folder of Hugging Face, too, by our names.

commands:
  inspect DIR   print what is in it: step, plan, versions, a table of parameters with shapes and sizes
  verify DIR    read all of its files and compare their checksums
  diff A B      print what differs between two, whatever the plans that saved them
  convert SRC DST --to FORM
                write the weights of one as a folder of Hugging Face or of plain PyTorch, or those of a folder of
                Hugging Face as a checkpoint

examples:
  colossus checkpoint inspect runs/first
  colossus checkpoint verify runs/first/checkpoints/step-00000500
  colossus checkpoint diff runs/first runs/second --only 'model/*' --tolerance 1e-6
  colossus checkpoint convert runs/first models/first --to hf

'colossus checkpoint COMMAND --help' tells more.
"""


def parse(words: list[str]) -> tuple[str, argparse.Namespace]:
    """The command and its arguments.

    Raises:
        SystemExit: after a usage error, or help, was printed.
    """
    parser = Parser("checkpoint", "", "")
    if not words or words[0] in ("-h", "--help", "help"):
        print(SUMMARY, end="", file=sys.stdout if words else sys.stderr)
        raise SystemExit(0 if words else 2)
    command = words[0]
    if command not in COMMANDS:
        close = nearest(command, list(COMMANDS))
        hint = f"did you mean {close}?" if close else f"commands: {', '.join(COMMANDS)}"
        parser.error(f"no command {command!r}; {hint}")
    return command, {"inspect": _inspect, "verify": _verify, "diff": _diff, "convert": _convert}[
        command
    ]().parse_intermixed_args(words[1:])


def _inspect() -> Parser:
    parser = Parser(
        "checkpoint inspect",
        "Print what is in a checkpoint: step, time, versions and plan; how much of it are parameters and optimizer\n"
        "state; the full shape, dtype and size of each parameter, whatever the plan was. Those that the layers of a\n"
        "list have alike are one row. Only the manifest is read.",
        "exit codes: 0 printed, 1 damaged, 2 no checkpoint or wrong usage\n",
    )
    parser.add_argument("dir", metavar="DIR", help=WHAT)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--all",
        action="store_true",
        help="every tensor, optimizer state too; in JSON also which file has which box",
    )
    return parser


def _verify() -> Parser:
    parser = Parser(
        "checkpoint verify",
        "Read all files of a checkpoint and compare their sizes and checksums with what was written. Of a folder of\n"
        "checkpoints the newest is verified; when its files are not all there, that is said, and the one is verified\n"
        "that a run would resume from.",
        "exit codes: 0 whole, 1 damaged: the file is named, 2 no checkpoint or wrong usage, 130 stopped by Ctrl-C\n",
    )
    parser.add_argument("dir", metavar="DIR", help=WHAT)
    parser.add_argument(
        "--all", action="store_true", help="verify every checkpoint of the folder, in the order of their steps"
    )
    return parser


def _diff() -> Parser:
    parser = Parser(
        "checkpoint diff",
        "Print what differs between two checkpoints: tensors that only one has, shapes, dtypes, for each tensor the\n"
        "largest difference, absolute and relative to its largest element, and state that is no tensor, such as the\n"
        "step. Plans and configs that differ are printed, and are no difference; under different plans the generators\n"
        "of ranks are not compared. Needs little memory, whatever the size. Checksums are not compared: see verify.",
        "exit codes: 0 equal (within a tolerance), 1 damaged, 2 no checkpoint or wrong usage, 3 they differ,\n"
        "            130 stopped by Ctrl-C\n\n"
        "examples:\n  colossus checkpoint diff runs/a runs/b\n"
        "  colossus checkpoint diff runs/a/checkpoints/step-00000100 runs/a/checkpoints/step-00000200 "
        "--only 'model/*'\n"
        "  colossus checkpoint diff runs/plain runs/tensor4 --only 'model/*' --only 'optimizer/*' --tolerance 1e-5\n",
    )
    parser.add_argument("a", metavar="A", help=WHAT)
    parser.add_argument("b", metavar="B", help="another one")
    parser.add_argument(
        "--tolerance",
        type=_tolerance,
        default=0.0,
        metavar="T",
        help="difference that is allowed, relative to the largest element of a tensor (default: 0, the same bits)",
    )
    parser.add_argument(
        "--absolute",
        type=_tolerance,
        default=0.0,
        metavar="T",
        help="absolute difference that is allowed anyway: for tensors of nothing but rounding (default: 0)",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="compare only keys that this matches: model/NAME, optimizer/NAME/ENTRY, step, ..; may be repeated",
    )
    parser.add_argument("--all", action="store_true", help="print every difference, not the largest 20")
    return parser


#: of ``--dtype``, to torch's names
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def _convert() -> Parser:
    parser = Parser(
        "checkpoint convert",
        "Write the weights of SRC in another form, one tensor at a time, without processes and whatever the plan that\n"
        "saved them. DST is a new folder; it is there when it is complete. Optimizer state is not converted.\n\n"
        "  --to hf        a model folder of Hugging Face (config.json, model.safetensors): for models that are a\n"
        "                 GPT-2, Llama or ViT; others are refused, with the options that differ\n"
        "  --to colossus  a checkpoint with weights only: checkpoint.weights=DST begins a run with them",
        "exit codes: 0 written, 1 SRC is damaged, 2 wrong usage, or it cannot be written, 130 stopped by Ctrl-C\n\n"
        "examples:\n"
        "  colossus checkpoint convert runs/first models/first --to hf\n"
        "  colossus checkpoint convert runs/first models/first --to hf --dtype bf16 --max-shard-size 2GB\n"
        "  colossus checkpoint convert models/llama-3.2-1b checkpoints/llama --to colossus\n"
        "  colossus launch config.py checkpoint.weights=checkpoints/llama\n",
    )
    parser.add_argument("src", metavar="SRC", help=f"{WHAT}, or a model folder of Hugging Face")
    parser.add_argument("dst", metavar="DST", help="the folder to write, which must not be there")
    parser.add_argument("--to", required=True, choices=WEIGHT_WRITERS.names(), help="the form that is written")
    parser.add_argument(
        "--dtype", choices=list(DTYPES), help="of the weights that are written (default: as they are stored)"
    )
    parser.add_argument(
        "--max-shard-size",
        type=_num_bytes,
        default=5 * 10**9,
        metavar="SIZE",
        help="of one file: 500MB, 5GB, .. (default: 5GB); a single tensor may be larger",
    )
    return parser


def _num_bytes(text: str) -> int:
    digits = text.rstrip("BKMGIbkmgi ")
    unit = text[len(digits) :].strip().upper()
    try:
        value = float(digits) * _UNITS[unit]
    except (ValueError, KeyError):
        value = 0.0
    if not 1 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a size of 1 byte or more, such as 500MB or 5GB, got {text!r}")
    return int(value)


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number, 0 or more, got {text!r}")
    return value
