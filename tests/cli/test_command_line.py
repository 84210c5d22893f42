"""The command line before anything starts: help, ``config``, ``show``, usage errors, and no torch in any of them."""

# configs are written with dict(...), and so are the tests of them

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from colossus.cli.main import main

REPOSITORY = Path(__file__).parents[2]
FILE = """
parallel = dict(data=2, tensor=2)
model = dict(type="GPT", num_layers=2, hidden_size=64, num_heads=4)
data = dict(type="PythonStdlib")
"""


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "small.py"
    path.write_text(FILE)
    return str(path)


def run(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    environment.pop("WORLD_SIZE", None)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)


# No torch


LINES = {
    "--help": 0,
    "launch --help": 0,
    "config FILE": 0,
    "show FILE --timeline parallel.tensor.mode=2.5d parallel.tensor=8 parallel.tensor.depth=2": 0,
    "show FILE --graph parallel.strategy=sgp": 0,
    "launch FILE parallel.tensor=3": 2,
    "compare FILE --strategies sgp sgb": 2,
}


def test_answers_without_importing_torch(config: str) -> None:
    """One after the other in a new Python."""
    lines = [line.replace("FILE", config).split() for line in LINES]
    done = run(
        "import contextlib, io, sys; from colossus.cli.main import main\n"
        f"for words in {lines!r}:\n"
        "    with contextlib.redirect_stderr(io.StringIO()) as err:\n"
        "        code = main(words)\n"
        "    print('\\nANSWERED', code, bool(err.getvalue()), 'Traceback' in err.getvalue(), 'torch' in sys.modules)"
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWERED")]
    assert answers == [f"ANSWERED {code} {code == 2} False False" for code in LINES.values()], done.stderr


# config


def test_config_prints_a_config_file(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", config, "train.steps=7"]) == 0
    first = capsys.readouterr().out
    assert "steps=7," in first
    again = tmp_path / "again.py"
    again.write_text(first)
    assert main(["config", str(again)]) == 0
    assert capsys.readouterr().out == first


def test_help_of_a_key(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", config, "--help", "train.seed"]) == 0
    assert capsys.readouterr().out.startswith("train.seed: whole number at least 0, by default 0: seed of initial")
    assert main(["config", config, "--help", "model.hidden_sise"]) == 2
    assert "did you mean model.hidden_size?" in capsys.readouterr().err
    assert main(["config", config, "--help"]) == 0
    assert "usage: colossus config" in capsys.readouterr().out


def test_options_and_overrides_mix(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--nproc=4", config, "train.steps=3", "--json", "train.seed=4"]) == 0
    train = json.loads(capsys.readouterr().out)["train"]
    assert (train["steps"], train["seed"]) == (3, 4)


def test_world_size_of_torchrun(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert main(["config", config, "parallel.data=None", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parallel"]["data"] == 4
    assert main(["config", config]) == 2
    assert capsys.readouterr().err.startswith("colossus: small.py: parallel: data 2 x tensor 2 = 4, but 8 processes\n")


# Errors


def test_config_error_is_a_short_block(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", config, "train.sed=3", "train.steps=0"]) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    lines = seen.err.splitlines()
    assert lines[0] == "colossus: small.py: 2 problems"
    assert lines[1] == "  train.steps: must be at least 1, got 0"
    assert lines[2].startswith("  train.sed: no such key; did you mean train.seed?")
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "usage: colossus COMMAND"),
        (
            ["lunch"],
            "colossus: 'lunch' is no command; did you mean colossus launch? commands: new, launch, config, show",
        ),
        (["config.py"], "colossus: 'config.py' is no command; did you mean colossus launch config.py? commands:"),
        (["config"], "colossus config: the following arguments are required: FILE\n  see colossus config --help"),
        (["config", "FILE", "--nproc", "0"], "colossus config: argument --nproc: must be a whole number of at least 1"),
        (["launch", "FILE", "--train.steps=3"], "colossus launch: unrecognized arguments: --train.steps=3\n  overr"),
        (["launch", "FILE", "--nprox=3"], "colossus launch: unrecognized arguments: --nprox=3\n  did you mean --nproc"),
        (["launch", "FILE", "train.steps"], "colossus: small.py: 'train.steps' has no '=': an override"),
        (["launch", "FILE", "--nnodes", "2"], "colossus: --nnodes 2 needs --rdzv-endpoint host:port"),
        (
            ["launch", "FILE", "--nnodes", "3:2"],
            "colossus launch: argument --nnodes: must be a number of nodes,",
        ),
        (["config", "a=b", "FILE"], "colossus: a=b: the config file comes first, overrides (section.key=value) after"),
    ],
)
def test_usage_errors(config: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([config if word == "FILE" else word for word in words]) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err.startswith(message)


# show


def test_show_small_plan(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", config]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "small",
        "plan        data 2 x tensor 2 (1d): 4 processes",
        "rank order  pipeline, data, sequence, tensor (outermost first)",
        "batch       32 sequences = data 2 x microbatches 1 x 16",
        "model       GPT, 124,672 parameters, 66,880 on each rank",
        "",
        "groups",
        "  data    [0 2]  [1 3]",
        "  tensor  [0 1]  [2 3]",
        "",
        "rank  pipeline  data  sequence  tensor",
        "   0         0     0         0       0",
        "   1         0     0         0       1",
        "   2         0     1         0       0",
        "   3         0     1         0       1",
    ]


def test_show_of_4096_ranks_is_short_unless_asked(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["parallel.data=None", "parallel.tensor=8", "parallel.tensor.mode=2.5d", "parallel.tensor.depth=2"]
    words = ["show", config, *plan, "--nproc", "4096", "train.global_batch_size=2048"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "plan        data 512 x tensor 8 (2.5d): 4,096 processes\n" in text
    assert "  tensor  [0 1 .. 7]  [8 9 .. 15]  [16 17 .. 23]  [24 25 .. 31]  ... 512 groups" in text
    assert "  data    [0 8 .. 4088]" in text
    assert "rank  pipeline  data  sequence  depth  row  col\n" in text
    assert "  63         0     7         0      1    1    1\n(4,032 more ranks; --all prints them)" in text
    assert main([*words, "--all"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 4096


def test_show_of_one_process_and_a_users_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.py"
    path.write_text("import torch\n\ndef Net(n=3):\n    return torch.nn.Linear(2, n)\n\nmodel = dict(type=Net)\n")
    assert main(["show", str(path)]) == 0
    text = capsys.readouterr().out
    assert "plan        data 1: 1 process\n" in text
    assert "model       Net, 9 parameters\n" in text
    assert "groups      none: one rank has no neighbours" in text
    assert main(["show", str(path), "model.n=None"]) == 0
    assert "model       Net (its parameters are known when it is built)" in capsys.readouterr().out


# What is handed on


def test_launch_hands_its_arguments_on(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def command(*arguments: Any, **options: Any) -> int:
        calls.append((*arguments, options))
        return 1

    monkeypatch.setitem(sys.modules, "colossus.launch.command", SimpleNamespace(run=command))
    words = ["--nproc", "2", "--nnodes", "2", "--rdzv-endpoint", "h:1", "--run-dir", "d", "--resume", "--dry-run"]
    words += ["--max-restarts", "3"]
    assert main(["launch", config, "train.steps=3", *words, "train.seed=1"]) == 1
    options = dict(nproc=2, run_dir="d", nnodes=(2, 2), rdzv_endpoint="h:1", resume=True, dry_run=True, max_restarts=3)
    assert calls == [(config, ["train.steps=3", "train.seed=1"], options)]
