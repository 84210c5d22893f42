"""``colossus show --timeline``: the picture in letters, in a file, and the error for a schedule that is wrong."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from colossus.cli.main import main
from colossus.registry import SCHEDULES
from colossus.schedule.build import make_schedule
from colossus.schedule.draw import draw
from colossus.schedule.simulate import simulate

REPOSITORY = Path(__file__).parents[2]
FILE = """
parallel = dict(pipeline=2)
schedule = dict(microbatches=3)
train = dict(global_batch_size=12)
"""
GOLDEN = """\
schedule    1f1b, 2 stages on 2 ranks, 3 microbatches
time        in forwards of a rank; a backward takes 2, each half of it 1, a transfer 0

rank 0  F0--F1--........B0======F2--B1======....B2======
rank 1  ....F0--B0======F1--B1======F2--B2======........
time    0                                             12
F forward; B backward; . idle

makespan 12, bubble 25.0 %

rank  bubble  peak in flight
   0  25.0 %               2
   1  25.0 %               1
"""


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "60")
    SCHEDULES.names()  # so that what a test registers is all that is taken back
    monkeypatch.setattr(SCHEDULES, "_entries", dict(SCHEDULES._entries))


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "small.py"
    path.write_text(FILE)
    return str(path)


def test_the_timeline(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", config, "--timeline"]) == 0
    assert capsys.readouterr().out == GOLDEN


def test_halves_and_chunks() -> None:
    text = draw(simulate(make_schedule("zb-v", 2, 3)), 60)
    assert text.splitlines() == [
        "rank 0  F0F1F2f0b0w0f1b1w1B0W0f2b2w2B1W1B2W2..",
        "rank 1  ..F0f0F1f1b0w0F2B0W0f2b1w1B1b2B2W1w2W2",
        "time    0                                   19",
        "F forward; B backward of inputs; W backward of weights; . idle; "
        "capitals: a rank's 1st, 3rd ... stage, small: its 2nd, 4th ...",
    ]


USERS = """
from colossus.registry import SCHEDULES
from colossus.schedule.actions import Action

@SCHEDULES.register("mine")
def mine(stages, microbatches, hurry=False):
    first = [Action("forward", 0, 0), Action("backward", 0, 0)]
    last = [Action("forward", 1, 0), Action("backward", 1, 0)]
    return [first, last[::-1] if hurry else last]

parallel = dict(pipeline=2)
schedule = dict(type={type}, hurry={hurry})
"""


@pytest.mark.parametrize("kind", ['"mine"', "mine"])
def test_a_schedule_of_the_users_own(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    path = tmp_path / "own.py"
    path.write_text(USERS.format(type=kind, hurry=False))
    assert main(["show", str(path), "--timeline"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("schedule    mine, 2 stages on 2 ranks, 1 microbatch\n")
    assert "makespan 6, bubble 50.0 %" in out


def test_no_matplotlib(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    assert main(["show", config, "--timeline", str(tmp_path / "out.svg")]) == 2
    assert capsys.readouterr().err == (
        "colossus: --timeline: a picture needs matplotlib, which comes with an extra: pip install 'colossus[plot]'\n"
    )


def test_a_picture(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    for ending, start in ((".svg", b"<?xml"), (".png", b"\x89PNG")):
        path = tmp_path / f"out{ending}"
        assert main(["show", config, "--timeline", str(path), "schedule.type=zb-v"]) == 0
        assert capsys.readouterr().out.endswith(f"drawn in {path}\n")
        assert path.read_bytes().startswith(start)


def test_the_timeline_loads_no_torch(config: str) -> None:
    code = f"""
import sys
from colossus.cli.main import main
code = main(["show", {config!r}, "--timeline", "schedule.type=interleaved"])
sys.exit(code or ("torch is loaded" if {{"torch", "matplotlib"}} & sys.modules.keys() else 0))
"""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert run.returncode == 0, run.stderr
