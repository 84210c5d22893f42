"""The arguments of every command, and help that teaches."""

from __future__ import annotations

import argparse
from typing import NoReturn

from colossus.picture import FORMATS
from colossus.registry import nearest

OVERRIDES = """\
overrides are section.key=value and win over the file:
  train.steps=50  parallel.tensor=4  parallel.tensor.mode=2d  model.hidden_size=256
"""

SUMMARY = """\
usage: colossus COMMAND ...

Train large models on many processes, declared in a Python config file.

commands:
  launch FILE   train
  config FILE   print the resolved config
  show FILE     print which rank is where, what runs when (--timeline), who mixes with whom (--graph),
                what becomes of each parameter (--strategy)
  doctor        test this machine: devices, backend, cores, speed between ranks, ports
  verify FILE   train a few steps under the plan and in one process, and name the first thing that differs
  compare FILE  the same job under several data-parallel strategies or plans, in one table
  evaluate DIR  the loss of a checkpoint's model on its run's validation data, or on other data
  generate DIR  continue text with the model of a checkpoint
  checkpoint inspect|verify|diff DIR
                what is in a checkpoint, whether it is whole, what differs between two

options:
  --version     print the version
  -h, --help    print this; 'colossus COMMAND --help' tells more

a first run:
  colossus config configs/gpt_stdlib.py
  colossus show configs/gpt_stdlib.py parallel.tensor=2
  colossus launch configs/gpt_stdlib.py train.steps=50
  colossus verify configs/gpt_stdlib.py
  colossus evaluate gpt_stdlib
  colossus generate gpt_stdlib --prompt "def "

"""

EXIT_CODES = (
    "exit codes: 0 done, 1 failed at run time, 2 wrong config or usage, 3 verify or diff found a\n"
    "            difference, 130 stopped by Ctrl-C, 129 by a hang-up, 143 by SIGTERM, SIGUSR1 or SIGUSR2 (a\n"
    "            batch system); under torchrun the exit code is torchrun's own, 1 whatever the rank's was\n"
)


class Parser(argparse.ArgumentParser):
    """An argument parser of one command; its errors say what to type instead."""

    def __init__(self, command: str, description: str, epilog: str) -> None:
        super().__init__(
            prog=f"colossus {command}",
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        hint = ""
        if message.startswith("the following arguments are required"):
            message = message.replace(", section.key=value", "")  # of which none is enough
        unknown = message.removeprefix("unrecognized arguments: ").split()
        if message.startswith("unrecognized arguments") and unknown:
            option = unknown[0].partition("=")[0]
            known = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
            close = nearest(option, known)
            if "." in option:
                hint = f"\n  overrides have no dashes: {unknown[0].lstrip('-')}"
            elif close:
                hint = f"\n  did you mean {close}?"
        self.exit(2, f"{self.prog}: {message}{hint}\n  see {self.prog} --help\n")


def positive_integer(text: str) -> int:
    """An argument that is a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return value


def positive_number(text: str) -> float:
    """An argument that is a finite number above zero."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above zero, got {text!r}")
    return value


def make_parser(command: str) -> Parser:
    """The parser of one of `COMMANDS`."""
    parsers = {"config": _config, "show": _show, "launch": _launch, "doctor": _doctor, "verify": _verify}
    return parsers[command]()


COMMANDS = ("launch", "config", "show", "doctor", "verify", "compare", "evaluate", "generate", "checkpoint")


def _config() -> Parser:
    parser = Parser(
        "config",
        "Print the resolved config: every key, with defaults and overrides. The output is a config file again,\n"
        "unless the model or data is an object. Nothing is started.",
        OVERRIDES + "\nexample:\n  colossus config configs/gpt_stdlib.py parallel.tensor=2 --nproc 8\n",
    )
    _file(parser)
    _nproc(parser, "processes of the run (default: WORLD_SIZE under torchrun, else the product of the sizes)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _show() -> Parser:
    parser = Parser(
        "show",
        "Print who is where: for every rank its coordinate on every axis, and the groups along each axis.\n"
        "Works for any plan, of any size, in any tensor mode; nothing is started. With --timeline, what each rank of\n"
        "the pipeline does when, its bubble and the activations it holds, for any schedule. With --graph, which\n"
        "replica sends to which in each step, with what weight, and how fast that brings replicas together. With\n"
        "--strategy, which way the gradient of each table (sparse=True) takes, and what all of them would send.",
        OVERRIDES + "\nexamples:\n  colossus show config.py parallel.tensor.mode=2.5d parallel.tensor.size=8 "
        "parallel.tensor.depth=2 --nproc 4096\n"
        "  colossus show config.py --timeline parallel.pipeline=4 schedule.type=zb-h1 schedule.microbatches=8\n"
        "  colossus show config.py --timeline timeline.svg   # a picture, too; needs the extra: colossus[plot]\n"
        "  colossus show config.py --graph parallel.data=8 parallel.strategy.type=sgp\n"
        "  colossus show config.py --strategy parallel.data=8 parallel.strategy=hybrid\n",
    )
    _file(parser)
    _nproc(parser, "processes of the run (default: WORLD_SIZE under torchrun, else the product of the sizes)")
    parser.add_argument("--all", action="store_true", help="print every rank of a plan of more than 64")
    parser.add_argument(
        "--timeline",
        nargs="?",
        const="",
        metavar="OUT",
        help=f"draw the pipeline schedule over time; with OUT ({', '.join(FORMATS)}) into this file, too",
    )
    parser.add_argument(
        "--graph",
        action="store_true",
        help="print the graph of a gossip strategy: peers by step, contraction, steps to consensus",
    )
    parser.add_argument(
        "--strategy",
        action="store_true",
        help="print what the data-parallel strategy does with each parameter, and the bytes that it sends",
    )
    return parser


def _launch() -> Parser:
    parser = Parser(
        "launch",
        "Train. The config is checked first, then the processes start. Runs the same under torchrun and srun.",
        OVERRIDES + "\nexamples:\n  colossus launch configs/gpt_stdlib.py --nproc 4\n"
        "  colossus launch config.py train.steps=50 --run-dir runs/try\n"
        "  colossus launch config.py checkpoint.every=500      # saves, also when it is stopped\n"
        "  colossus launch config.py --resume                  # goes on where it was saved\n"
        "  colossus launch config.py --nnodes 2 --nproc 8 --rdzv-endpoint node0:29500   # on both nodes\n"
        "  torchrun --nproc-per-node 4 -m colossus launch config.py\n\n"
        "on GPUs each process of a node has a device of its own: that of its number among those that\n"
        "CUDA_VISIBLE_DEVICES shows. comm.backend=gloo lets processes share devices, slowly.\n\n" + EXIT_CODES,
    )
    _file(parser)
    _nproc(parser, "processes on each node (default: the product of the sizes over the nodes)")
    parser.add_argument("--run-dir", metavar="DIR", help="folder of metrics and config (default: runs/<name>-<time>)")
    parser.add_argument("--nnodes", type=positive_integer, default=1, metavar="M", help="number of nodes (default: 1)")
    parser.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="where the nodes meet; needed with --nnodes")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the latest checkpoint of --run-dir, of checkpoint.dir, or of the newest run of this name "
        "(the config's, or the file's; whatever else is in the config), in its run folder; the plan may be another",
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything, say what would run, start nothing")
    return parser


def _doctor() -> Parser:
    parser = Parser(
        "doctor",
        "Print versions, devices (memory, driver, which of them reach each other), backend, cores, the variables of\n"
        "NCCL and CUDA that are set, latency and bandwidth between ranks, and what of all this will make trouble.",
        EXIT_CODES,
    )
    _nproc(parser, "ranks to measure between (default: 2)")
    parser.set_defaults(nproc=2)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _verify() -> Parser:
    parser = Parser(
        "verify",
        "Train the model of a config file for a few steps twice, with the same seed and samples, in float64: in one\n"
        "process without parallelism, and under the plan of the file. Say that they agree, with the largest\n"
        "difference seen, or name the first thing that differs: an initial value, a sample, the output of a module,\n"
        "the loss, the gradient of a parameter, the gradient norm, a weight after a step.",
        OVERRIDES
        + "\nexamples:\n  colossus verify config.py                                      # the plan of the file\n"
        "  colossus verify config.py parallel.data=2 parallel.tensor=2   # another one\n"
        "  colossus verify config.py parallel.tensor.mode=2d parallel.tensor.size=4 parallel.data=1\n"
        "  colossus verify config.py model.num_layers=2 train.global_batch_size=8 --steps 1   # small, so quick\n\n"
        "The model must fit into one process in float64: verify a small one (fewer layers, smaller batch), it has\n"
        "the same code. Dropout is turned off in both runs, and reported. The optimizer is that of the file; weights\n"
        "whose gradient is rounding noise are not compared after its steps. Hooks of the file do not run.\n\n"
        "exit codes: 0 they agree, 1 failed at run time, 2 wrong config or usage, 3 they differ,\n"
        "            130 stopped by Ctrl-C\n",
    )
    _file(parser)
    _nproc(parser, "processes of the plan (default: the product of the sizes)")
    parser.add_argument("--steps", type=positive_integer, default=3, metavar="K", help="steps of each run (default: 3)")
    parser.add_argument(
        "--tolerance",
        type=positive_number,
        default=1e-9,
        metavar="T",
        help="relative difference allowed (default: 1e-9)",
    )
    return parser


def _file(parser: Parser) -> None:
    parser.add_argument("file", metavar="FILE", help="config file (Python)")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="override of a key of the file")


def _nproc(parser: Parser, help_text: str) -> None:
    parser.add_argument("--nproc", type=positive_integer, metavar="N", help=help_text)
