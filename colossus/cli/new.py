"""``colossus new``: a folder with a config and a training script to start from."""

from __future__ import annotations

import argparse
import ast
import json
import re
import shlex
import textwrap
from pathlib import Path

from colossus.arithmetic import counted
from colossus.cli.parser import Parser
from colossus.config import ConfigError, load_config
from colossus.config.loading import CONFIGS
from colossus.config.plans import world_size
from colossus.registry import nearest

#: becomes train.py
SCRIPT = Path(__file__).with_name("training_script.py")
DEFAULT = "mlp"


def make_parser() -> Parser:
    width = max(len(path.stem) for path in config_files()) + 2
    starts = "\n".join(
        textwrap.fill(
            f"{path.stem:<{width}}{_summary(path)}", 115, initial_indent="  ", subsequent_indent=" " * (width + 2)
        )
        for path in config_files()
    )
    parser = Parser(
        "colossus new",
        "Write config.py and train.py into a folder, to start from.\n\n"
        "config.py declares model, data, plan and training; `colossus launch config.py` trains it. train.py is the\n"
        "same run as a loop of your own. A file that exists is never overwritten.",
        f"what --from can name:\n{starts}\n\nexamples:\n"
        "  colossus new mine && cd mine && colossus launch config.py        # a model of your own, on one process\n"
        "  colossus new gpt --from gpt_stdlib && colossus launch gpt/config.py train.steps=50\n",
    )
    parser.add_path("folder", "DIR", "folder of the two files, made where needed")
    parser.add_argument(
        "--from",
        dest="start",
        metavar="NAME",
        default=DEFAULT,
        help=f"the config to start from, of those below (default: {DEFAULT}, a model of your own with colossus.layers)",
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    starts = {path.stem: path for path in config_files()}
    if arguments.start not in starts:
        close = nearest(arguments.start, list(starts))
        hint = f"did you mean {close}? " if close else ""
        raise ConfigError(f"--from {arguments.start}: no such config; {hint}there are: {', '.join(starts)}")
    folder = Path(arguments.folder)
    texts = {
        "config.py": _as_own(starts[arguments.start], folder.resolve().name),
        "train.py": SCRIPT.read_text(),
    }
    for name in texts:
        if (folder / name).exists():
            raise ConfigError(f"{folder / name} exists and is not overwritten: name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with (folder / name).open("x") as file:
                file.write(text)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from None
    processes = world_size(load_config(folder / "config.py").parallel)
    config, script = (shlex.quote(str(folder / name)) for name in texts)
    start = "python" if processes == 1 else f"torchrun --nproc-per-node {processes}"
    print(
        f"{config} and {script} are written, from {arguments.start}: {counted(processes, 'process', 'es')}\n\n"
        f"  colossus launch {config} --dry-run    # check everything, start nothing\n"
        f"  colossus launch {config}              # train\n"
        f"  {start} {script}    # the same in a loop of your own"
    )
    return 0


def config_files() -> list[Path]:
    """Return the configs that the package has, by name."""
    return sorted(CONFIGS.glob("*.py"))


def _summary(path: Path) -> str:
    """Return the first sentence of a config's docstring."""
    paragraph = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0]
    return " ".join(paragraph.split())


def _as_own(path: Path, name: str) -> str:
    """Return the text of a config as a file ``config.py`` whose runs have a name."""
    text = re.sub(rf"\b(configs|examples)/{path.stem}\.py", "config.py", path.read_text())
    if name.startswith(".") or not name:  # no name of a run
        return text
    line = f"name = {json.dumps(name)}  # run folders are runs/{name}-<time>"
    return re.sub(r"^train = .*$", lambda train: f"{train[0]}\n{line}", text, count=1, flags=re.MULTILINE)
