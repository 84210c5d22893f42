"""``colossus launch`` of a pipeline: what is refused before any process, and how a run ends whose stage fails."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from helpers.launching import LAUNCH, finish, rows_of, start

from colossus.launch import command

STAGES = Path(__file__).parents[1] / "helpers" / "launched" / "stages.py"
COMMAND = [*LAUNCH[:-1], str(STAGES), "--run-dir", "run"]


def run(tmp_path: Path, *overrides: str, **variables: str) -> tuple[int, str, str]:
    return finish(start([*COMMAND, *overrides], tmp_path, **variables))


def test_a_pipeline_runs_and_every_rank_knows_the_loss(tmp_path: Path) -> None:
    code, out, err = run(tmp_path)
    assert code == 0, err
    losses = [row["loss"] for row in rows_of(tmp_path / "run") if "loss" in row]
    assert len(losses) == 5
    assert all(0 < loss < 10 for loss in losses)
    assert "done: 5 steps" in out


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.pipeline=3"], "3 stages for 2 blocks (0 to 1): every stage needs a block; use at most 2 stages"),
        (["schedule.type=interleaved", "schedule.chunks=2"], "4 stages for 2 blocks"),
        (["parallel.pipeline.split=[1, 2]"], "1 + 2 = 3, but the model has 2 blocks"),
    ],
)
def test_refused_before_any_process(
    tmp_path: Path, overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.run(str(STAGES), overrides, run_dir="run") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "failures").exists()


@pytest.mark.usefixtures("no_processes")
def test_a_bad_schedule_is_refused_with_its_first_bad_action(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CIRCLE", "1")
    assert command.run(str(STAGES), [], run_dir="run") == 2
    err = capsys.readouterr().err
    assert "stages.py: schedule" in err
    assert "rank 0, action 0 (backward of microbatch 3 on stage 0) needs the forward of microbatch 3" in err


@pytest.mark.parametrize(
    ("trouble", "messages"),
    [
        ("raise", ["the block of stage 1 has failed", "rank 1", "pipeline 1", "_trouble"]),
        pytest.param(
            "hang",
            ["run failed: rank 1 at step 3", "in _trouble", "rank 0 stopped because rank 1 did not answer."],
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_stage_that_fails_ends_the_run(tmp_path: Path, trouble: str, messages: list[str]) -> None:
    since = time.monotonic()
    code, out, err = run(tmp_path, TROUBLE=trouble)
    assert code == 1, out + err
    for message in messages:
        assert message in err
    assert time.monotonic() - since < 45, "torch takes a few seconds to import, the time-out is 3"
    assert len([row for row in rows_of(tmp_path / "run") if "loss" in row]) == 2
