"""The table of exit codes in the documentation is what the commands return."""

from __future__ import annotations

import importlib
import re
import signal
import sys
from pathlib import Path

import pytest
from helpers.launching import TINY, launch

from colossus import machine
from colossus.checkpoint.manifest import MANIFEST
from colossus.cli import main as command_line
from colossus.cli import plan
from colossus.cli.main import COMMANDS, main
from colossus.launch import decide
from colossus.launch.ends import STOP_SIGNALS, exit_code
from colossus.verify.run_verify import AGREE, DIFFERENT

TABLE = re.findall(
    r"^\| (\d+) \| (.+?) \| (.+) \|$", (Path(__file__).parents[2] / "docs" / "launching.md").read_text(), re.MULTILINE
)
LAUNCH, OTHERS = ({int(row[0]): row[column] for row in TABLE} for column in (1, 2))


def help_of(name: str) -> str:
    """Return the help of a command and of those below it."""
    parsers = [importlib.import_module(f"colossus.cli.{name}").make_parser()]
    for action in parsers[0]._actions:
        if isinstance(action.choices, dict):
            parsers += action.choices.values()
    return " ".join(" ".join(parser.format_help().split()) for parser in parsers)


def test_the_table_has_every_code_of_the_commands() -> None:
    of_launch = {decide.DONE, decide.FAILED, decide.USAGE, *map(exit_code, STOP_SIGNALS)}
    assert {code for code, text in LAUNCH.items() if not text.startswith("-")} == of_launch
    assert (AGREE, DIFFERENT) == (decide.DONE, plan.DIFFERS)
    assert set(OTHERS) == of_launch | {DIFFERENT, 128 + signal.SIGPIPE}
    for signum in STOP_SIGNALS:
        assert signum.name in LAUNCH[exit_code(signum)]


def test_the_help_of_each_command_has_codes_of_the_table() -> None:
    num_commands = 0
    for name in COMMANDS.values():
        for epilog in re.findall(r"exit codes: (.+?)(?= examples:| exit codes:|$)", help_of(name)):
            codes = {int(word) for word in re.findall(r"(?<![\w.-])(\d+)(?= [a-zA-Z])", epilog)}
            assert {0, 1, 2} <= codes <= set(OTHERS), (name, codes)
            num_commands += 1
    assert num_commands > 10


def test_commands_end_with_the_codes_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped() -> int:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["launch", str(TINY), "--dry-run"]) == 0
    assert main(["launch", str(TINY), "parallel.data=3"]) == 2
    assert main(["launch", "nothing.py"]) == 2
    assert main(["launch", str(TINY), "--no-such-option"]) == 2
    assert main(["no-such-command"]) == 2
    (tmp_path / "step-00000001").mkdir()
    assert main(["checkpoint", "verify", str(tmp_path)]) == 1
    (tmp_path / "step-00000001" / MANIFEST).write_text("no manifest")
    assert main(["checkpoint", "verify", str(tmp_path)]) == 1
    assert main(["checkpoint", "verify", str(tmp_path / "none")]) == 2
    assert command_line._stoppable(stopped) == 130
    capsys.readouterr()


def test_a_launch_that_cannot_start_processes_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "is_reachable", lambda address: False)
    code, _, err = launch(tmp_path)
    assert code == decide.FAILED
    assert err.startswith("colossus: the processes could not be started: this machine does not reach its own address")
