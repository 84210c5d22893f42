"""``colossus checkpoint convert``: write the weights of a checkpoint in another form."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

from colossus.arithmetic import byte_count
from colossus.checkpoint.describe import printable
from colossus.checkpoint.durable import require_new
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.weight_sources import find_weights, open_weights
from colossus.cli.parser import CHECKPOINT, path_of, size_argument
from colossus.registry import WEIGHT_WRITERS

#: torch's names of the values of ``--dtype``
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
#: bytes: the smallest value of ``--max-shard-size``
_LEAST_SHARD = 10**6


def add_parser(commands: Any) -> None:
    """Add the command to the subcommands of ``colossus checkpoint``."""
    parser = commands.add_parser(
        "convert",
        help="write weights as a folder of Hugging Face or of torch's DCP, or such a folder as a checkpoint",
        description="Write the weights of SRC in another form, one tensor at a time, in this process, whatever the\n"
        "plan that saved them. DST is a new folder, which appears when it is complete. Optimizer state is not\n"
        "converted.\n\n"
        "  --to hf        a model folder of Hugging Face (config.json, model.safetensors): for models that are a\n"
        "                 GPT-2, Llama or ViT; others are refused, with the options that differ\n"
        "  --to dcp       a folder that torch.distributed.checkpoint.load reads, with the names of the plain torch\n"
        "                 module; all weights are in memory at once\n"
        "  --to colossus  a checkpoint with weights only: checkpoint.weights=DST starts a run from them",
        epilog="exit codes: 0 written, 1 SRC is damaged, 2 wrong usage, or DST cannot be written, 130 Ctrl-C\n\n"
        "examples:\n"
        "  colossus checkpoint convert runs/first models/first --to hf --dtype bf16 --max-shard-size 2GB\n"
        "  colossus checkpoint convert models/llama-3.2-1b checkpoints/llama --to colossus\n"
        "  colossus launch config.py checkpoint.weights=checkpoints/llama\n",
    )
    parser.add_path("src", "SRC", f"{CHECKPOINT}, or a folder of Hugging Face, of torch's DCP or of DeepSpeed")
    parser.add_path("dst", "DST", "the folder to write, which must not exist")
    parser.add_argument("--to", required=True, choices=WEIGHT_WRITERS.names(), help="the form to write")
    parser.add_average()
    parser.add_argument(
        "--dtype", choices=list(DTYPES), help="dtype of the written weights (default: as they are stored)"
    )
    help_text = "largest size of a file: 500MB, 5GB, .. (default: 5GB); a single tensor may be larger"
    parser.add_argument("--max-shard-size", type=_shard_size, default=5 * 10**9, metavar="SIZE", help=help_text)
    parser.set_defaults(run=_convert)


def _shard_size(text: str) -> int:
    """Return the bytes of a largest file; a number without a unit would mean a file for each tensor."""
    size = size_argument(text)
    if size < _LEAST_SHARD:
        raise argparse.ArgumentTypeError(f"must be at least 1MB, such as 500MB or 5GB, got {text!r}")
    return size


def _convert(arguments: argparse.Namespace) -> int:
    target, began = Path(arguments.dst), time.perf_counter()
    require_new(target)
    damaged: dict[Path, CheckpointError] = {}
    source = find_weights(path_of(arguments.src), damaged)
    for error in damaged.values():
        print(printable(f"damaged: {error}; using {source} instead"), file=sys.stderr)
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)  # more threads do not speed up copies
    dtype = getattr(torch, DTYPES[arguments.dtype]) if arguments.dtype is not None else None
    with open_weights(source, arguments.average) as reader:
        reader.verify()
        total = sum(reader.entry(f"model/{name}").num_bytes for name in reader.manifest.names("model"))
        with progress(total) as advance:
            WEIGHT_WRITERS.get(arguments.to)(
                reader, target, dtype=dtype, max_shard_bytes=arguments.max_shard_size, on_tensor=advance
            )
    size = byte_count(sum(file.stat().st_size for file in target.iterdir()))
    print(printable(f"{target}: weights from {source}, {size} in {time.perf_counter() - began:.1f} s"))
    return 0


@contextmanager
def progress(num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show the progress of reading or writing on standard error, if that is a terminal.

    Args:
        num_bytes: bytes of all pieces.

    Yields:
        A function to call with the bytes of each piece that is done.
    """
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console, is_watched = Console(stderr=True), sys.stderr.isatty()
    with Progress(*columns, console=console, transient=True, disable=not is_watched) as bar:
        task = bar.add_task("", total=num_bytes)
        yield lambda size: bar.advance(task, size)
