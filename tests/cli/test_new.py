"""``colossus new`` writes what runs, and overwrites nothing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from colossus.cli.main import main
from colossus.cli.new import config_files
from colossus.config import load_config

STARTS = [path.stem for path in config_files()]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("start", STARTS)
def test_every_start_is_a_config_and_a_script(start: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "a b/mine", "--from", start]) == 0
    config = load_config("a b/mine/config.py")
    assert config.name == "mine"
    text = Path("a b/mine/config.py").read_text()
    assert f"{start}.py" not in text
    assert "colossus launch config.py" in (ast.get_docstring(ast.parse(text)) or "")
    assert "Path(__file__).with_name" in Path("a b/mine/train.py").read_text()
    out = capsys.readouterr().out
    assert "'a b/mine/config.py' and 'a b/mine/train.py' are written" in out
    assert ("python 'a b/mine/train.py'" in out) == (start == "mlp")


@pytest.mark.parametrize("name", ["config.py", "train.py"])
def test_nothing_is_overwritten(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine").mkdir()
    (Path("mine") / name).write_text("precious")
    assert main(["new", "mine"]) == 2
    assert capsys.readouterr().err == f"colossus: mine/{name} exists and is not overwritten: name another folder\n"
    assert [path.name for path in Path("mine").iterdir()] == [name]
    assert (Path("mine") / name).read_text() == "precious"


def test_what_cannot_be_started_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "mine", "--from", "gpt_stdlb"]) == 2
    message = capsys.readouterr().err
    assert message.startswith(
        "colossus: --from gpt_stdlb: no such config; did you mean gpt_stdlib? there are: dpo_stdlib,"
    )
    assert not Path("mine").exists()
    Path("file").write_text("")
    assert main(["new", "file"]) == 2
    assert "file: cannot be written" in capsys.readouterr().err


def test_help_lists_the_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "--help"]) == 0
    out = capsys.readouterr().out
    assert {line.split()[0] for line in out.splitlines() if line.startswith("  ") and line[2:3].isalpha()} >= {*STARTS}
    assert "A small byte-level GPT on the source of the Python standard library" in out
    assert max(map(len, out.splitlines())) <= 115
