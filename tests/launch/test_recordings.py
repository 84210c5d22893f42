"""Who waits for whom: from recordings of torch's flight recorder, and from our own log; NCCL's watchdog in a record."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import grid, run_ranks
from torch.distributed.flight_recorder.components.loader import read_dump

from colossus.comm import collectives, flight_recorder, log
from colossus.context.parallel_context import ParallelContext
from colossus.launch import causes, failure, nccl_watch, rank_failure, recordings, stopped
from colossus.launch.failure import FailureRecord
from colossus.launch.rank_run import RankRun
from colossus.launch.stop import StopSignals

GRID = grid(data=2, tensor=2)


def entry(number: int, state: str, what: str = "all_reduce", **more: Any) -> dict[str, Any]:
    """An entry as NCCL's groups record it (version 2.10 of the format)."""
    frames = [
        {"name": "all_reduce", "filename": "/venv/torch/distributed/distributed_c10d.py", "line": 1},
        {"name": "start", "filename": str(Path(collectives.__file__)), "line": 2},
        {"name": "forward", "filename": "/home/user/model.py", "line": 30},
    ]
    sizes = {"input_sizes": [[4, 8]], "input_dtypes": ["BFloat16"], "output_sizes": [[4, 8]]}
    known = {"pg_id": 0, "process_group": ("0", "default_pg"), "is_p2p": False, "p2p_seq_id": 0, "retired": False}
    own = {"collective_seq_id": number, "state": state, "profiling_name": f"nccl:{what}", "frames": frames}
    return {**known, **sizes, **own, **more}


def save(folder: Path, rank: int, *entries: dict[str, Any], ranks: str = "[0, 1, 2, 3]") -> None:
    """A recording as torch writes it."""
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
    path = recordings.path_of(folder, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    dump = {"version": "2.10", "entries": list(entries), "pg_config": config, "pg_status": {}, "nccl_comm_state": {}}
    path.write_bytes(pickle.dumps(dump, protocol=2))


def test_the_rank_that_did_not_come_is_named(tmp_path: Path) -> None:
    done = [entry(56, "completed", "all_gather", retired=True)]
    for rank in (0, 1, 3):
        save(tmp_path, rank, *done, entry(57, "started"), entry(58, "scheduled"))
    save(tmp_path, 2, *done)
    line, where = recordings.who_is_missing(tmp_path, [], GRID)
    assert line == (
        "ranks 0, 1, 3 wait in #57 all_reduce [4x8 bfloat16] at /home/user/model.py:30, over all ranks; rank 2 has not "
        "come to it, its last there: #56 all_gather [4x8 bfloat16] at /home/user/model.py:30"
    )
    assert where == f"recorded by torch: {tmp_path}/failures/flight_recorder_rank_*"
    assert read_dump("flight_recorder_rank_", str(recordings.path_of(tmp_path, 2)))["rank"] == 2  # torch's own reader


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ([entry(57, "started", "all_gather")], "ranks 0, 1 wait in #57 all_reduce"),
        ([entry(57, "started", "all_gather")], "where ranks 2, 3 run #57 all_gather [4x8 bfloat16] at /home"),
        ([entry(57, "started", input_sizes=[[4, 9]])], "where ranks 2, 3 run #57 all_reduce [4x9 bfloat16]"),
        ([entry(57, "started")], "all of its ranks have come to it, and it does not end"),
        ([entry(58, "completed")], "ranks 0, 1 wait in #57"),
        ([], "rank 2 has not come to it, its last there: none; rank 3 has not come to it"),
        (None, "nothing is recorded here of ranks 2, 3"),
    ],
)
def test_what_else_ranks_may_wait_for(tmp_path: Path, others: list[dict[str, Any]] | None, words: str) -> None:
    for rank in (0, 1):
        save(tmp_path, rank, entry(57, "started"))
    for rank in (2, 3) if others is not None else ():
        save(tmp_path, rank, *(others or []))
    assert words in recordings.who_is_missing(tmp_path, [], GRID)[0]


def test_groups_are_known_by_their_axes(tmp_path: Path) -> None:
    """The mesh's groups have torch's names, ours what they were made for; a message between two ranks is neither."""
    ours = {"process_group": ("7", "colossus/1/dataxtensor/1_0_3_2")}
    mesh = {"process_group": ("9", "mesh_data")}
    for rank in (0, 1, 3):
        message = entry(4, "started", "send 0->1", is_p2p=True)
        save(tmp_path, rank, entry(3, "started", **ours), entry(5, "started", **mesh), message)
    save(tmp_path, 2, entry(2, "completed", **ours))
    lines = recordings.who_is_missing(tmp_path, [], GRID)
    assert lines[0].startswith(
        "ranks 0, 1, 3 wait in #3 all_reduce [4x8 bfloat16] at /home/user/model.py:30, over datax"
    )
    assert lines[1].startswith("rank 0 waits in #5 all_reduce")  # ranks 0 and 2 are its group; 1 and 3 have come
    assert "over data; rank 2 has not come to it" in lines[1]
    assert len(lines) == 4
    assert "ranks 1, 3 wait in #5" in lines[2]
    assert not any("send" in line for line in lines)


class _Runs:
    """What pickle would run on being read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_recording_that_is_broken_or_runs_code_is_left_alone(tmp_path: Path) -> None:
    bad = pickle.dumps({"entries": [_Runs(tmp_path / "was run")]})
    save(tmp_path, 0, entry(57, "started"))
    for rank, content in ((1, b"\x80\x02"), (2, bad), (3, pickle.dumps({"entries": 3})), (4, b"")):
        recordings.path_of(tmp_path, rank).write_bytes(content)
    assert list(recordings.read_all(tmp_path)) == [0]
    assert not (tmp_path / "was run").exists()
    assert "nothing is recorded here of ranks 1, 2, 3" in recordings.who_is_missing(tmp_path, [], GRID)[0]


def _one_stays_away(context: ParallelContext, folder: str) -> FailureRecord:
    """Four ranks, of which the last does not come to the third sum over data; what each would leave behind."""
    data, tensor = context.group("data"), context.group("tensor")
    for _ in range(2):
        collectives.all_reduce(torch.ones(3, 5), data).wait()
    collectives.all_gather(torch.ones(2), tensor).wait()
    if context.rank != 3:
        collectives.all_reduce(torch.ones(7), data, what="of rank 1" if context.rank == 1 else "")
    flight_recorder.write(recordings.path_of(Path(folder), context.rank))
    time.sleep(0.2)
    return failure.of_exception(RuntimeError("timeout"), context.rank, progress=log.progress())


def test_recorder_and_log_say_the_same_of_real_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "channel_for", lambda x, group: None)  # through c10d, which torch records
    records = run_ranks(4, _one_stays_away, str(tmp_path), plan=GRID)
    by_torch = recordings.who_is_missing(tmp_path, [], GRID)
    assert len(recordings.read_all(tmp_path)) == 4
    assert by_torch[0].startswith("rank 1 waits in #3 all_reduce [7 float32] at ")
    assert "over data; rank 3 has not come to it, its last there: #2 all_reduce [3x5 float32] at" in by_torch[0]
    assert "tests/launch/test_recordings.py:" in by_torch[0]
    told = [FailureRecord(**json.loads(json.dumps(vars(record)))) for record in records]
    (by_log,) = recordings.who_is_missing(None, told, GRID)
    assert by_log.startswith("rank 1 waits in #3 all_reduce of rank 1 [7 float32] at")
    assert "over data; rank 3 has not come to it, its last there: #2 all_reduce [3x5 float32] at" in by_log
    assert "rank 0" not in by_log  # all have come there: perhaps nobody has looked yet


# -- a rank whose collective NCCL gives up --------------------------------------------------------------------


def exit_code(body: Callable[..., None], *arguments: Any) -> int | None:
    """Of a forked process that runs this."""
    process = multiprocessing.get_context("fork").Process(target=body, args=arguments)
    process.start()
    process.join(20.0)
    process.kill()
    return process.exitcode


def _run_of(folder: Path, *, has_launcher: bool = True) -> RankRun:
    return RankRun(1, StopSignals(), folder, has_launcher=has_launcher, folder=folder, grid=GRID, step=3)


def _pretend_nccl(monkeypatch: pytest.MonkeyPatch, *, pending: bool = True) -> None:
    monkeypatch.setattr(nccl_watch, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(flight_recorder, "is_recording", lambda: True)
    monkeypatch.setattr(flight_recorder, "has_pending", lambda: pending)


def _lose_a_collective(folder: Path, group: tuple[str, str], is_told: bool) -> None:
    """In a process of its own: the main thread waits for a device, and a watchdog has given up."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        _pretend_nccl(monkeypatch)
        monkeypatch.setattr(nccl_watch, "_OWN_WORDS_SECONDS", 0.1)
        monkeypatch.setattr(flight_recorder, "failed_group", lambda: group)
        run = _run_of(folder)
        run.has_failed = is_told
        run.flush_metrics = (folder / "flushed").touch
        rank_failure.watch_nccl(run, type("Config", (), {"comm": type("Comm", (), {"timeout_seconds": 120.0})}))
        time.sleep(1.5 if is_told else 30.0)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (
            ("colossus/1/dataxtensor/0_1_2_3", "TIMEOUT"),
            "timeout: a collective over dataxtensor did not end within comm.timeout_seconds = 120",
        ),
        (("mesh_data", "COMM_ERROR"), "NCCL: a collective over data failed: the network, or a rank that has ended"),
    ],
)
def test_a_collective_that_nccl_gives_up_is_a_failure_record(
    tmp_path: Path, group: tuple[str, str], message: str
) -> None:
    assert exit_code(_lose_a_collective, tmp_path, group, False) == 1
    (record,) = failure.read_all(tmp_path)
    assert (record.rank, record.kind, record.step) == (1, "communication", 3)
    assert record.message.startswith(message)
    assert "time.sleep(1.5 if is_told else 30.0)" in record.traceback  # what the main thread was in
    assert record.is_timeout == (group[1] == "TIMEOUT")
    assert list(recordings.read_all(tmp_path)) == [1]
    assert (tmp_path / "flushed").exists()
    failure.clear(tmp_path)
    assert not (tmp_path / failure.FOLDER).exists()


def test_a_rank_that_says_so_itself_is_left_to_it(tmp_path: Path) -> None:
    assert exit_code(_lose_a_collective, tmp_path, ("mesh_data", "TIMEOUT"), True) == 0
    assert failure.read_all(tmp_path) == []


@pytest.mark.parametrize(("pending", "kind"), [(True, "communication"), (False, "stuck")])
def test_a_rank_that_waits_for_others_is_not_the_one_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pending: bool, kind: str
) -> None:
    """Under NCCL ranks that wait do not hear that another has gone: they are ended like one that hangs."""
    _pretend_nccl(monkeypatch, pending=pending)
    rank_failure.write_hard_end(_run_of(tmp_path), threading.get_ident())
    (record,) = failure.read_all(tmp_path)
    assert record.kind == kind
    assert list(recordings.read_all(tmp_path)) == [1]


def test_the_block_says_who_waits_for_whom(tmp_path: Path) -> None:
    for rank in (0, 1, 3):
        save(tmp_path, rank, entry(57, "started"))
    save(tmp_path, 2, entry(56, "completed"))
    lost = "timeout: a collective over data did not end within comm.timeout_seconds = 120"
    records = [FailureRecord(rank, "communication", "DistBackendError", lost, "", step=3) for rank in (0, 1, 3)]
    records.append(FailureRecord(2, "stuck", "Stuck", "did not reach the end of its step", "loop()", step=3))
    config = type("Config", (), {})
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(stopped, "strategy_options", lambda config: None)
        text = stopped.failure_block(causes.rank_causes(records, {}), config, GRID, tmp_path)
    assert "run failed: rank 2 at step 3" in text
    assert "who waits for whom:\n  ranks 0, 1, 3 wait in #57 all_reduce" in text
    assert f"recorded by torch: {tmp_path}/failures" in text
    assert "rank 0 said: timeout: a collective over data" in text
