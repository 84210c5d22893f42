"""Who waits for whom, from the collectives that ranks have begun; a collective that NCCL gives up, in a record."""

from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path

import pytest
import torch
from helpers.launching import failed_ranks
from helpers.ranks import grid, run_ranks

from colossus.comm import collectives, flight_recorder, log
from colossus.context.parallel_context import ParallelContext
from colossus.launch import rank_failure, recordings
from colossus.launch.ends import RankEnd
from colossus.launch.rank_failure import RankRun
from colossus.launch.recordings import who_is_missing
from colossus.launch.stop import StopSignals

GRID = grid(data=2, tensor=2)
ALL = "dataxtensor"
Begun = tuple[str, int, str, str, bool]


def begun(number: int, what: str = "all_reduce [4x8 bfloat16]", axes: str = ALL, is_done: bool = False) -> Begun:
    return axes, number, what, "model.py:30", is_done


def missing(*of_ranks: list[Begun] | None) -> list[str]:
    """Of ranks that have begun these; None: one that has left no record."""
    records = [
        RankEnd(rank, kind="communication", message="timeout", progress=progress)
        for rank, progress in enumerate(of_ranks)
        if progress is not None
    ]
    return who_is_missing(None, records, GRID)


def test_the_rank_that_did_not_come_is_named() -> None:
    before, ahead = begun(56, "all_gather [4 float32]", is_done=True), [begun(57), begun(58)]
    (line,) = missing([before, *ahead], [before, *ahead], [before], [before, begun(57)])
    assert line == (
        "ranks 0, 1, 3 wait in #57 all_reduce [4x8 bfloat16] at model.py:30, over dataxtensor; rank 2 did not come to "
        "it, the last there: #56 all_gather [4 float32] at model.py:30"
    )


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ([begun(57, "all_gather [4x8 bfloat16]")], "where ranks 2, 3 run #57 all_gather [4x8 bfloat16] at model.py:30"),
        ([begun(57, "all_reduce [4x9 bfloat16]")], "where ranks 2, 3 run #57 all_reduce [4x9 bfloat16]"),
        ([begun(57)], None),  # all have come
        (None, "at model.py:30, over dataxtensor; nothing is known of ranks 2, 3"),
        ([begun(9, axes="data")], "; ranks 2, 3 did not come to it, the last there: none"),
    ],
)
def test_what_else_ranks_may_wait_for(others: list[Begun] | None, words: str | None) -> None:
    lines = missing([begun(57)], [begun(57)], others, others)
    assert bool(lines) == (words is not None)
    assert words is None or words in lines[0]


def _one_stays_away(context: ParallelContext) -> RankEnd:
    """Four ranks, of which the last does not come to the third sum over data; what each would leave behind."""
    data, tensor = context.group("data"), context.group("tensor")
    for _ in range(2):
        collectives.all_reduce(torch.ones(3, 5), data).wait()
    collectives.all_gather(torch.ones(2), tensor).wait()
    if context.rank != 3:
        collectives.all_reduce(torch.ones(7), data, what="of rank 1" if context.rank == 1 else "")
    time.sleep(0.2)
    return rank_failure.of_exception(RuntimeError("timeout"), context.rank, progress=log.progress())


def test_of_real_groups() -> None:
    records = run_ranks(4, _one_stays_away, plan=GRID)
    ends = [RankEnd(**json.loads(json.dumps(vars(record)))) for record in records]
    (line,) = who_is_missing(None, ends, GRID)
    assert line.startswith("rank 1 waits in #3 all_reduce of rank 1 [7 float32] at")
    assert "tests/launch/test_recordings.py:" in line
    assert "over data; rank 3 did not come to it, the last there: #2 all_reduce [3x5 float32] at" in line


# -- a rank whose collective NCCL gives up --------------------------------------------------------------------


def _run_of(folder: Path) -> RankRun:
    return RankRun(1, StopSignals(), has_launcher=False, folder=folder, grid=GRID, step=3)


def _pretend_nccl(monkeypatch: pytest.MonkeyPatch, *, pending: bool = True) -> None:
    monkeypatch.setattr(rank_failure, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(flight_recorder, "is_recording", lambda: True)
    monkeypatch.setattr(flight_recorder, "has_pending", lambda: pending)


def _lose_a_collective(folder: Path, group: tuple[str, str]) -> None:
    """In a process of its own: the main thread waits for a device, and a watchdog has given up."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        _pretend_nccl(monkeypatch)
        monkeypatch.setattr(rank_failure, "_MAIN_THREAD_SECONDS", 0.1)
        monkeypatch.setattr(flight_recorder, "failed_group", lambda: group)
        run = _run_of(folder)
        run.flush_metrics = (folder / "flushed").touch
        rank_failure.watch_nccl(run, 120.0)
        time.sleep(30.0)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (
            ("colossus/1/dataxtensor/0_1_2_3", "TIMEOUT"),
            "timeout: a collective over dataxtensor did not end within comm.timeout_seconds = 120",
        ),
        (
            ("mesh_data", "COMM_ERROR"),
            "NCCL: a collective over data failed (COMM_ERROR): the network, or a rank that has ended",
        ),
    ],
)
def test_a_collective_that_nccl_gives_up_is_a_failure_record(
    tmp_path: Path, group: tuple[str, str], message: str
) -> None:
    process = multiprocessing.get_context("fork").Process(target=_lose_a_collective, args=(tmp_path, group))
    process.start()
    process.join(20.0)
    process.kill()
    assert process.exitcode == 1
    (record,) = failed_ranks(tmp_path)
    assert (record.rank, record.kind, record.step) == (1, "communication", 3)
    assert record.message.startswith(message)
    assert "time.sleep(30.0)" in record.traceback  # what the main thread was in
    assert record.is_timeout == (group[1] == "TIMEOUT")
    assert recordings.recording_of(tmp_path, 1).exists()
    (torchs,) = who_is_missing(tmp_path, [], GRID)
    assert (
        torchs == f"torch has recorded more, which `torchfrtrace` reads: {tmp_path}/recordings/flight_recorder_rank_*"
    )
    assert (tmp_path / "flushed").exists()
    recordings.remove_recordings(tmp_path)
    assert not (tmp_path / recordings.FOLDER).exists()
