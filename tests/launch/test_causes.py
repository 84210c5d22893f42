"""Who failed first: the ranking of causes and the block that is printed."""

from __future__ import annotations

import itertools
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import colossus
from colossus.config import ConfigError
from colossus.context.grid import RankGrid
from colossus.launch import failure
from colossus.launch.causes import rank_causes, stop_code
from colossus.launch.failure import FailureRecord
from colossus.launch.outcome import RankExit
from colossus.launch.report import block

GRID = RankGrid({"pipeline": 1, "data": 2, "sequence": 1, "tensor": 2})
PEER = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5650"


def record(rank: int, error: BaseException, **details: Any) -> FailureRecord:
    return failure.of_exception(error, rank, **{"host": f"host{rank}", "step": 3, **details})


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_own_errors_come_first_by_time_and_those_that_blame_another_rank_last() -> None:
    records = [record(rank, RuntimeError(PEER), time=1.0) for rank in (0, 2)]
    records += [record(1, ValueError("late"), time=5.0), record(3, TypeError("early"), time=4.0)]
    found = rank_causes(records, {rank: RankExit(1) for rank in range(4)})
    assert [cause.rank for cause in found] == [3, 1, 0, 2]
    error = FloatingPointError("the gradient on rank 2 is nan")
    error.culprit = 2  # type: ignore[attr-defined]
    records = [record(rank, error, time=float(rank)) for rank in range(4)]
    assert [cause.rank for cause in rank_causes(records, {})] == [2, 0, 1, 3]
    stopped = record(0, OSError("a loader's process is gone"), after_signal=15)
    assert rank_causes([stopped, record(1, ValueError("boom"), time=9e9)], {})[0].rank == 1


def test_a_killed_rank_is_named_from_its_exit_code() -> None:
    records = [record(rank, RuntimeError(PEER)) for rank in (0, 1, 3)]
    exits = {0: RankExit(1), 1: RankExit(1), 2: RankExit(-signal.SIGKILL), 3: RankExit(1)}
    text = block(rank_causes(records, exits), GRID)
    assert "run failed: rank 2 at step 3" in text
    assert "rank 2 (data 1, tensor 0) was killed by SIGKILL: out of memory" in text
    assert "ranks 0, 1, 3 stopped because rank 2 went away." in text


def test_a_replica_that_keeps_no_step_with_others_has_its_own_or_none() -> None:
    """Of two replicas of two ranks rank 2 is killed; its partner was at step 3, and of the others nobody may say."""
    exits = {0: RankExit(1), 1: RankExit(1), 2: RankExit(-signal.SIGKILL), 3: RankExit(1)}
    others = [record(rank, RuntimeError(PEER)) for rank in (0, 1)]
    partner = record(3, RuntimeError(PEER))
    for records, title in ((others, "rank 2 ="), ([*others, partner], "rank 2 at step 3 =")):
        assert f"run failed: {title}" in block(rank_causes(records, exits), GRID, replicas_keep_step=False)
        assert "run failed: rank 2 at step 3 =" in block(rank_causes(records, exits), GRID)


def test_a_rank_that_the_launcher_had_to_kill_is_named_when_no_other_failed_by_itself() -> None:
    exits = {rank: RankExit(1) for rank in (0, 1, 3)} | {2: RankExit(-signal.SIGKILL, after_stop=True)}
    found = rank_causes([record(0, ValueError("boom"))], exits | {3: RankExit(143, after_stop=True)})
    assert [(cause.rank, cause.kind) for cause in found] == [(0, "error"), (1, "death"), (2, "stuck")]
    timeout = RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:84] Timed out waiting 1000ms for recv operation")
    text = block(rank_causes([record(rank, timeout) for rank in (0, 1, 3)], exits), GRID)
    assert "rank 2 (data 1, tensor 0) answered no signal and had to be killed" in text
    assert "ranks 0, 1, 3 stopped because rank 2 did not answer." in text


def test_only_communication_errors_say_so() -> None:
    found = rank_causes([record(0, RuntimeError(PEER), time=2.0), record(1, RuntimeError(PEER), time=1.0)], {})
    text = block(found, GRID)
    assert "rank 1 (host host1; data 0, tensor 1) raised RuntimeError; no rank failed by itself" in text


def test_an_exit_without_a_word_is_a_cause() -> None:
    text = block(rank_causes([], {0: RankExit(143, after_stop=True), 1: RankExit(7)}), GRID)
    assert "rank 1 (data 0, tensor 1) ended with exit code 7 without an exception" in text


@given(st.permutations(range(4)), st.lists(st.floats(0, 100), min_size=4, max_size=4))
def test_the_culprit_does_not_depend_on_order_or_clocks(order: list[int], times: list[float]) -> None:
    culprit = order[0]
    errors = {rank: ValueError("own") if rank == culprit else RuntimeError(PEER) for rank in range(4)}
    records = [record(rank, errors[rank], time=times[rank]) for rank in order]
    assert rank_causes(records, {})[0].rank == culprit


def test_the_block_shows_traceback_collectives_and_the_others(tmp_path: Path) -> None:
    collectives = [f"#{number} all_reduce over data" for number in range(20)]
    records = [
        record(1, raised(ValueError("boom")), collectives=collectives, time=1.0),
        record(2, ValueError("boom"), time=2.0),
        record(3, TypeError("something else"), time=3.0),
    ]
    text = block(rank_causes(records, {}), GRID, tmp_path)
    lines = text.splitlines()
    assert "run failed: rank 1 at step 3" in lines[1]
    assert lines[2] == "rank 1 (host host1; data 0, tensor 1) raised ValueError"
    assert "raise error" in text
    assert "  ValueError: boom" in lines
    assert "  #19 all_reduce over data" in lines
    assert "  #11 all_reduce over data" not in lines
    assert "rank 2 raised the same error." in lines
    assert "rank 3 also failed: TypeError: something else" in lines
    assert "rank 0 stopped because rank 1 went away." in lines
    assert f"run folder: {tmp_path}" in lines
    text = block(rank_causes([record(9, ValueError("x"), step=None)], {}), RankGrid({"data": 64}))
    assert "run failed: rank 9 before the first step" in text
    assert "ranks 0-8, 10-63 stopped because rank 9 went away." in text


@pytest.mark.parametrize(
    ("exits", "code"),
    [
        ({0: RankExit(143), 1: RankExit(0)}, 143),
        ({0: RankExit(-15), 1: RankExit(143)}, 143),
        ({0: RankExit(0), 1: RankExit(0)}, None),
        ({0: RankExit(143, after_stop=True), 1: RankExit(1)}, None),
        ({0: RankExit(143), 1: RankExit(-9)}, None),
    ],
)
def test_a_run_that_was_only_stopped(exits: dict[int, RankExit], code: int | None) -> None:
    assert stop_code(rank_causes([], exits), exits) == code


def test_the_victims_of_a_stopped_rank_are_no_failure() -> None:
    """It was told before it could tell the others; then they are, too. One that was only ended by us is none."""
    victim, own = record(0, RuntimeError(PEER)), record(0, ValueError("own"))
    for failed, ended, code in (
        (victim, RankExit(143), 143),
        (victim, RankExit(143, after_stop=True), None),
        (own, RankExit(143), None),
    ):
        exits = {0: RankExit(1), 1: ended}
        assert stop_code(rank_causes([failed], exits), exits) == code


def chained(outer: BaseException, inner: BaseException, *, explicit: bool) -> BaseException:
    try:
        try:
            raise inner
        except type(inner) as first:
            if explicit:
                raise outer from first
            raise outer  # noqa: B904
    except type(outer) as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("boom"), "error"),
        (RuntimeError(PEER), "communication"),
        # a rank that waits for another's key in the store
        (RuntimeError("wait timeout after 20000ms, keys: /colossus/1/data"), "communication"),
        (RuntimeError("timeout: rank 1 did not send the gradient of microbatch 0 within 4 s"), "communication"),
        (RuntimeError("shape mismatch"), "error"),
        # a user's own network access is no collective of ours
        (ConnectionResetError("Connection reset by peer"), "error"),
        (ConfigError("parallel.data: too many"), "config"),
        (SystemExit(3), "error"),
        (chained(ValueError("step failed"), RuntimeError(PEER), explicit=True), "communication"),
        (chained(ValueError("step failed"), RuntimeError(PEER), explicit=False), "communication"),
    ],
)
def test_whose_fault_an_error_is(error: BaseException, kind: str) -> None:
    assert failure.kind_of(error) == kind


def test_records_survive_the_file(tmp_path: Path) -> None:
    records = [record(rank, raised(ValueError(f"no {rank}")), collectives=["#1"]) for rank in (2, 0)]
    for each in records:
        failure.write(tmp_path, each)
    (tmp_path / "failures" / "rank7.json").write_text("{half")
    read = failure.read_all(tmp_path)
    assert [each.rank for each in read] == [0, 2]
    assert [(each.message, each.time) for each in read] == [(each.message, each.time) for each in reversed(records)]
    failure.clear(tmp_path)
    assert failure.read_all(tmp_path) == []


def test_the_record_of_a_stuck_rank_holds_its_stack() -> None:
    entered, leave = threading.Event(), threading.Event()

    def endless_loop_of_the_user() -> None:
        entered.set()
        leave.wait()

    thread = threading.Thread(target=endless_loop_of_the_user)
    thread.start()
    entered.wait()
    assert thread.ident is not None
    stuck = failure.of_stuck_rank(thread.ident, 4.0, rank=1, step=3)
    unready = failure.of_stuck_rank(thread.ident, 4.0, rank=1)
    leave.set()
    thread.join()
    assert "endless_loop_of_the_user" in stuck.traceback
    assert "within 4 s" in stuck.message
    assert "had not come to its first step" in unready.message


@pytest.mark.parametrize(
    ("room", "is_left_out"), [("launch", True), ("monitor", True), ("verify", True), ("engine", False)]
)
def test_frames_of_what_surrounds_a_run_are_left_out(room: str, is_left_out: bool) -> None:
    filename = str(Path(colossus.__file__).parent / room / "some.py")
    space: dict[str, Any] = {}
    exec(compile("def call(function):\n    function()\n", filename, "exec"), space)

    def broken_step_of_the_user() -> None:
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom") as caught:
        space["call"](broken_step_of_the_user)
    error = caught.value
    assert error.__traceback__ is not None
    held = failure.of_exception(error.with_traceback(error.__traceback__.tb_next), 0)
    assert "broken_step_of_the_user" in held.traceback
    assert (filename not in held.traceback) == is_left_out


def test_only_the_first_rank_reports(tmp_path: Path) -> None:
    assert [failure.is_first_to_report(tmp_path) for _ in range(3)] == [True, False, False]
    assert list(itertools.repeat(failure.is_first_to_report(None), 2)) == [True, True]
