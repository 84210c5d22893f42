"""Paths that a user gives: ``~`` is the home, whoever the user is; files of others are named."""

from __future__ import annotations

import importlib
import os
import pwd
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.launching import launch
from helpers.permissions import permissions_count

from colossus.checkpoint.folder import absolute, locate, root_of
from colossus.cli.main import COMMANDS, main
from colossus.cli.parser import path_argument
from colossus.config import ConfigError
from colossus.config.user_path import user_path
from colossus.data.text import TextFolder
from colossus.data.tokenizer import cached_ids, dataset_tokenizer
from colossus.hardware.measured import MeasuredFileError, load_measured
from colossus.monitor.row_file import RowFile

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a name, as a container that is started with a number has it."""

    def nobody(_: object) -> Any:
        raise KeyError("not found")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setattr(pwd, "getpwnam", nobody)
    monkeypatch.chdir(tmp_path)


def test_a_tilde_is_the_home_in_what_a_shell_leaves_as_it_is(home: Path, capsys: Captured) -> None:
    here = home.parent
    meant = {"~/x": home / "x", "~": home, "x/~": Path("x/~"), "./~": here / "~", "./~x": here / "~x", "-": Path("-")}
    for text, path in meant.items():
        assert user_path(text) == user_path(user_path(text)) == path
        assert path_argument(text) == str(path)
    assert path_argument("") == ""  # of an option that takes none or one
    assert root_of("~/c", Path()) == home / "c"
    assert absolute("~/c") == home / "c"
    (home / "c.py").write_text("model = dict(type='GPT')\ndata = dict(type='PythonStdlib')\n")
    assert main(["launch", "~/c.py", "--run-dir=~/run", "--dry-run"]) == 0
    assert f"run folder  {home / 'run'}" in capsys.readouterr().out
    assert main(["plot", "~/none"]) == 2
    assert main(["checkpoint", "inspect", "~/none"]) == 2
    assert str(home / "none") in capsys.readouterr().err
    (here / "~x").mkdir()
    assert main(["checkpoint", "inspect", "./~x"]) == 2
    assert "no such user" not in capsys.readouterr().err
    with pytest.raises(MeasuredFileError, match="No such file"):
        load_measured("~/none.json")


def test_every_option_of_a_path_understands_a_tilde() -> None:
    """Look at what is called FILE, DIR, OUT, RUN, SRC, .. in the help of a command."""
    seen = set()
    for name in COMMANDS.values():
        parsers = [importlib.import_module(f"colossus.cli.{name}").make_parser()]
        while parsers:
            parser = parsers.pop()
            for action in parser._actions:
                if isinstance(action.choices, dict):
                    parsers += action.choices.values()
                elif action.metavar in ("FILE", "DIR", "OUT", "OUT.json", "RUN", "SRC", "DST", "A", "B", "CHECKPOINT"):
                    assert action.type is path_argument, (parser.prog, action.dest)
                    seen.add((parser.prog, action.dest))
    assert len(seen) > 20


@pytest.mark.usefixtures("homeless")
def test_a_user_without_a_home(tmp_path: Path, capsys: Captured) -> None:
    said = rf"~/x: ~ is not known: HOME is not set, and user {os.getuid()} has no name here; write the whole path"
    for reads in (
        lambda: user_path("~/x"),
        lambda: root_of("~/x", Path()),
        lambda: locate(Path("~/x")),
        lambda: dataset_tokenizer("~/x", "data"),
        lambda: TextFolder("~/x", seq_len=4),
    ):
        with pytest.raises(ConfigError, match=said):
            reads()
    with pytest.raises(ConfigError, match="~nobody-at-all is not known: there is no such user"):
        user_path("~nobody-at-all/x")
    assert main(["launch", "c.py", "--run-dir=~/x"]) == 2
    assert "argument --run-dir: ~/x: ~ is not known: HOME is not set" in capsys.readouterr().err
    ids = np.arange(3, dtype=np.uint16)
    assert cached_ids("key", lambda: ids) is ids  # nothing is kept, and nothing is written here
    assert not list(tmp_path.iterdir())
    assert user_path(tmp_path) == tmp_path


def test_rows_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    path.chmod(0o400)
    with permissions_count():
        for last_step in (None, 1):
            with pytest.raises(ConfigError, match=r"metrics.jsonl: cannot be written to: Permission denied$"):
                RowFile(path, last_step)
        monkeypatch.setattr(os, "getuid", lambda: 4711)
        with pytest.raises(ConfigError, match=r"denied \(it is of user \d+, this run of user 4711\); move it away"):
            RowFile(path)
        path.chmod(0o000)
        with pytest.raises(ConfigError, match="Permission denied"):
            RowFile(path, 1)
    assert path.stat().st_size == 24


@pytest.mark.long
def test_a_run_whose_metrics_are_another_user_s(tmp_path: Path) -> None:
    assert launch(tmp_path, "checkpoint.every=2")[0] == 0
    (tmp_path / "run" / "metrics.jsonl").chmod(0o400)
    with permissions_count():
        code, _, err = launch(tmp_path, "checkpoint.every=2", "train.steps=7", "--resume")
    assert (code, err.count("Traceback")) == (2, 0)
    assert "metrics.jsonl: cannot be written to: Permission denied" in err
