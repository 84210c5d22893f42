"""``colossus launch``: train."""

from __future__ import annotations

import argparse

from colossus.cli.parser import EXIT_CODES, OVERRIDES, Parser, call, number_argument


def make_parser() -> Parser:
    parser = Parser(
        "colossus launch",
        "Train. The config is checked before a process starts. The command works the same under torchrun and srun.",
        OVERRIDES + "\nexamples:\n  colossus launch configs/gpt_stdlib.py --nproc 4\n"
        "  colossus launch config.py train.steps=50 --run-dir runs/try\n"
        "  colossus launch config.py checkpoint.every=500      # save every 500 steps, and when stopped\n"
        "  colossus launch config.py --resume                  # continue from the latest checkpoint\n"
        "  colossus launch config.py --nnodes 2 --nproc 8 --rdzv-endpoint node0:29500   # on both nodes\n"
        "  colossus launch config.py --nnodes 2:4 --rdzv-endpoint node0:29500 --max-restarts 9   # 2 nodes are enough\n"
        "  torchrun --nproc-per-node 4 -m colossus launch config.py\n\n"
        "On GPUs the n-th process of a node uses the n-th device of CUDA_VISIBLE_DEVICES. With comm.backend=gloo\n"
        "processes can share a device, slowly.\n\n" + EXIT_CODES,
    )
    parser.add_file()
    parser.add_nproc("processes on each node (default: the product of the plan's sizes, divided by the nodes)")
    parser.add_path("--run-dir", "DIR", "folder of metrics and config (default: runs/<name>-<time>, UTC)")
    parser.add_argument(
        "--nnodes",
        type=_node_range,
        default=(1, 1),
        metavar="M or MIN:MAX",
        help="number of nodes (default: 1). With a range, and launch.restarts, a run continues on fewer nodes when one "
        "is lost (fewer data replicas, the same global batch) and on more when it is back",
    )
    parser.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="address where the nodes meet, for --nnodes")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue from the latest checkpoint of --run-dir, of checkpoint.dir, or of the newest run with the name "
        "of the config (or of its file), in the folder of that run; the plan may be another one",
    )
    parser.add_argument(
        "--max-restarts",
        type=number_argument("a whole number", lambda value: value >= 0, int),
        metavar="N",
        help="start the ranks again after a failure, from the newest checkpoint, at most N times (launch.restarts.max)",
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything, print what would run, start nothing")
    return parser


def _node_range(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    numbers = [int(part) if part.isdecimal() else 0 for part in (least, most or least)]
    if not 1 <= numbers[0] <= numbers[1]:
        raise argparse.ArgumentTypeError(f"must be a number of nodes, or the fewest and the most (2:4), got {text!r}")
    return numbers[0], numbers[1]


def run(arguments: argparse.Namespace) -> int:
    # It checks the config itself, before it imports torch: under torchrun and srun only rank 0 prints what is wrong.
    return call("colossus.launch.command", "run", arguments, "file", "overrides")
