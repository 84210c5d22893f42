"""``colossus profile``: break down the time of a train step."""

from __future__ import annotations

import argparse
from pathlib import Path

from colossus.cli.parser import EXIT_CODES, OVERRIDES, Parser, call, load, number_argument
from colossus.config import Config, ConfigError
from colossus.launch import run_folder

_EPILOG = (
    OVERRIDES
    + """
examples:
  colossus profile configs/gpt_stdlib.py
  colossus profile config.py parallel.pipeline=2 --steps 5 --warmup 10 --ranks 0,2
  colossus profile config.py --ranks all --out runs/profile     # a trace of each rank

The run trains a few steps, without evaluations, checkpoints and the hooks of the config. All ranks time their steps.
The table (also in DIR/profile/summary.json) splits a step into forward, backward, optimizer, and waiting: for exposed
communication over each axis, for other stages of the pipeline, for data.
DIR/profile/rank<N>.trace.json.gz is the trace of torch.profiler for a rank; open it at https://ui.perfetto.dev.
To profile steps of a training run: colossus launch config.py train.profile.steps=(100,103)

"""
    + EXIT_CODES
)


def make_parser() -> Parser:
    parser = Parser(
        "colossus profile", "Train a few steps, and print how each rank spends the time of a step.", _EPILOG
    )
    parser.add_file()
    parser.add_count("--steps", "steps to profile", 3)
    parser.add_argument(
        "--warmup",
        type=number_argument("a whole number of at least 0", lambda value: value >= 0, int),
        default=5,
        metavar="N",
        help="steps before them (default: 5)",
    )
    parser.add_argument("--ranks", type=_ranks, default=(0,), metavar="N,N", help="ranks to trace, or all (default: 0)")
    parser.add_nproc("processes (default: the product of the plan's sizes)")
    parser.add_path("--out", "DIR", "the run folder (default: runs/profile-<name>-<time>)")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print what would run, start nothing")
    return parser


def _ranks(text: str) -> str | tuple[int, ...]:
    words = text.split(",")
    if text != "all" and not all(word.isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"must be ranks with commas between them (0,2) or all, got {text!r}")
    return "all" if text == "all" else tuple(map(int, words))


def run(arguments: argparse.Namespace) -> int:
    config = load(arguments)
    if arguments.out and run_folder.has_metrics(Path(arguments.out)):
        raise ConfigError(f"--out {arguments.out}: holds the metrics of another run already; name another folder")
    first, last = arguments.warmup + 1, arguments.warmup + arguments.steps
    launch_arguments = argparse.Namespace(
        file=arguments.file,
        overrides=[*arguments.overrides, *short_run(config, first, last, arguments.ranks)],
        nproc=arguments.nproc,
        dry_run=arguments.dry_run,
        run_dir=arguments.out or str(run_folder.default_folder(f"profile-{config.name}")),
    )
    return call("colossus.launch.command", "run", launch_arguments, "file", "overrides")


def short_run(config: Config, first: int, last: int, ranks: str | tuple[int, ...]) -> list[str]:
    """Return overrides that end a config's run after step ``last``, with the same steps up to there, and profile it.

    Args:
        config: config of the whole run.
        first, last: the profiled steps, from 1.
        ranks: ranks to trace, or ``all``.
    """
    return [
        f"train.steps={last}",
        f"train.schedule_steps={config.train.schedule_steps}",
        "train.eval_every=0",
        "train.log_every=1",
        f"train.profile=dict(steps=({first}, {last}), ranks={ranks!r})",
        "checkpoint.every=0",
        "checkpoint.resume=None",
        "hooks=()",
    ]
