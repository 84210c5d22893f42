"""What ranks write down when they fail, who failed first, and the block that is printed."""

from __future__ import annotations

import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.faults import native
from helpers.launching import failed_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist
from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

from colossus.comm.peer_gone import PeerGone, is_of_a_peer
from colossus.config import ConfigError, load_config
from colossus.context.grid import RankGrid
from colossus.context.local_ranks import RanksFailed, run_local_ranks
from colossus.engine.loss_spikes import LossSpike
from colossus.engine.rollback import Rollback
from colossus.launch import attempt_log, rank_failure
from colossus.launch.advice import memory_advice
from colossus.launch.ends import RankEnd, failed, stop_code
from colossus.launch.rank_failure import RankRun
from colossus.launch.report import block
from colossus.launch.stop import StopSignals
from colossus.server.calls import ServerGone

GRID = RankGrid({"pipeline": 1, "data": 2, "sequence": 1, "tensor": 2})
PEER = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5650"


def record(rank: int, error: BaseException, **details: Any) -> RankEnd:
    return rank_failure.of_exception(error, rank, **{"host": f"host{rank}", "step": 3, **details})


def exited(code: int, *, after_stop: bool = False, rank: int = 0) -> RankEnd:
    return RankEnd(rank, code, after_stop, "" if code else "finished")


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


# -- who failed first -----------------------------------------------------------------------------------------


def test_own_errors_come_first_by_time() -> None:
    records = [record(rank, PeerGone(PEER), time=1.0) for rank in (0, 2)]
    records += [record(1, ValueError("late"), time=5.0), record(3, TypeError("early"), time=4.0)]
    assert [end.rank for end in failed(records)] == [3, 1, 0, 2]
    stopped = record(0, OSError("a loader's process is gone"), after_signal=15)
    assert failed([stopped, record(1, ValueError("boom"), time=9e9)])[0].rank == 1
    ends = [exited(1, rank=1), exited(-signal.SIGKILL, after_stop=True, rank=2), exited(143, after_stop=True, rank=3)]
    ends_of_ranks = failed([*ends, record(0, ValueError("boom"), code=1)])
    assert [(end.rank, end.cause) for end in ends_of_ranks] == [(0, "error"), (1, "death"), (2, "stuck")]


@given(st.permutations(range(4)), st.lists(st.floats(0, 100), min_size=4, max_size=4))
def test_the_culprit_does_not_depend_on_order_or_clocks(order: list[int], times: list[float]) -> None:
    culprit = order[0]
    errors = {rank: ValueError("own") if rank == culprit else PeerGone(PEER) for rank in range(4)}
    records = [record(rank, errors[rank], time=times[rank]) for rank in order]
    assert failed(records)[0].rank == culprit


@pytest.mark.parametrize(
    ("ends", "error", "code"),
    [
        ({0: exited(143), 1: exited(0)}, None, 143),
        ({0: exited(-15), 1: exited(143)}, None, 143),
        ({0: exited(0), 1: exited(0)}, None, None),
        ({0: exited(143, after_stop=True), 1: exited(1)}, None, None),
        ({0: exited(143), 1: exited(-9)}, None, None),
        # rank 1 was told before it could tell rank 0; one that was only ended by us is no stop
        ({0: exited(1), 1: exited(143)}, PeerGone(PEER), 143),
        ({0: exited(1), 1: exited(143, after_stop=True)}, PeerGone(PEER), None),
        ({0: exited(1), 1: exited(143)}, ValueError("own"), None),
    ],
)
def test_a_run_that_was_only_stopped(ends: dict[int, RankEnd], error: Exception | None, code: int | None) -> None:
    if error is not None:
        ends = ends | {0: record(0, error, code=1)}
    assert stop_code(replace(end, rank=rank) for rank, end in ends.items()) == code


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("boom"), "error"),
        (native(RuntimeError(PEER)), "communication"),
        # two collectives are under way, and the other one has timed out
        (native(RuntimeError("Application timeout caused pair closure")), "communication"),
        # a rank that waits for another's key in the store
        (DistStoreError("wait timeout after 20000ms, keys: /colossus/1/data"), "communication"),
        (DistNetworkError("sendBytes failed on SocketImpl(fd=4): Broken pipe"), "communication"),
        (PeerGone("timeout: rank 1 did not send the gradient of microbatch 0 within 4 s"), "communication"),
        (native(DistBackendError("NCCL communicator was aborted on rank 1")), "communication"),
        (native(DistBackendError("ncclUnhandledCudaError: an illegal memory access was encountered")), "error"),
        (native(RuntimeError("shape mismatch")), "error"),
        # the words of a user are no collective of ours
        (RuntimeError("the tokenizer's server: Broken pipe"), "error"),
        (RuntimeError("Connection closed by peer"), "error"),
        (raised(RuntimeError(PEER)), "error"),
        (raised(DistBackendError("NCCL communicator was aborted on rank 1")), "error"),
        (RuntimeError("timeout: the loader did not send the batch"), "error"),
        (raised(ValueError("wait timeout of the database"), BrokenPipeError("Broken pipe")), "error"),
        # a user's own network access is no collective of ours
        (ConnectionResetError("Connection reset by peer"), "error"),
        (ConfigError("parallel.data: too many"), "config"),
        (SystemExit(3), "error"),
        (raised(ValueError("step failed"), native(RuntimeError(PEER))), "communication"),
        (raised(ValueError("step failed"), ServerGone(1, "10.0.0.1:7", "it was silent")), "communication"),
    ],
)
def test_whose_fault_an_error_is(error: BaseException, kind: str) -> None:
    assert rank_failure.kind_of(error) == kind


def _loses_its_peer(rank: int) -> None:
    dist.barrier()
    if rank == 1:
        raise RuntimeError("the database: Broken pipe, Connection closed by peer, gloo/transport")
    dist.all_reduce(torch.ones(3), async_op=True).wait()


def test_what_gloo_raises_is_told_from_a_users_words() -> None:
    with pytest.raises(RanksFailed, match=r"^rank 1 failed(?s:.*)the database") as failed:
        run_local_ranks(2, _loses_its_peer, is_victim=is_of_a_peer)
    assert failed.value.victims == {0}
    assert "RuntimeError: [" in failed.value.tracebacks[0], "gloo has a type of its own now"


# -- the block ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (
            exited(-signal.SIGKILL),
            ["rank 2 (data 1, tensor 0) was killed by SIGKILL: out of memory", "because rank 2 went away."],
        ),
        (
            exited(-signal.SIGKILL, after_stop=True),
            ["rank 2 (data 1, tensor 0) answered no signal and had to be killed", "because rank 2 did not answer."],
        ),
        (exited(7), ["rank 2 (data 1, tensor 0) ended with exit code 7 without an exception"]),
    ],
)
def test_a_rank_without_a_record_is_named_from_its_exit_code(ended: RankEnd, words: list[str]) -> None:
    records = [record(rank, PeerGone(PEER)) for rank in (0, 1, 3)]
    ended = replace(ended, rank=2)
    text = block(failed([*records, ended]), GRID)
    for line in ["run failed: rank 2 near step 3", "ranks 0, 1, 3 stopped because", *words]:
        assert line in text
    assert "run failed: rank 2 =" in block([ended], GRID)


def test_the_block_shows_traceback_collectives_and_the_others(tmp_path: Path) -> None:
    collectives = [f"#{number} all_reduce over data" for number in range(20)]
    records = [
        record(1, raised(ValueError("boom")), collectives=collectives, time=1.0),
        record(2, ValueError("boom"), time=2.0),
        record(3, TypeError("something else"), time=3.0),
    ]
    text = block(failed(records), GRID, tmp_path)
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
    text = block([record(9, ValueError("x"), step=None)], RankGrid({"data": 64}))
    assert "run failed: rank 9 before the first step" in text
    assert "ranks 0, 1, 2, 3 and 59 more stopped because rank 9 went away." in text
    ends_of_ranks = failed([record(0, PeerGone(PEER), time=2.0), record(1, PeerGone(PEER), time=1.0)])
    assert "rank 1 (host host1; data 0, tensor 1) raised PeerGone; no rank failed by itself" in block(
        ends_of_ranks, GRID
    )


# -- records --------------------------------------------------------------------------------------------------


def test_only_our_own_errors_ask_to_go_back() -> None:
    assert record(0, LossSpike("spike", Rollback(5, None))).rollback == Rollback(5, None)
    users = ValueError("of a database")
    users.rollback = (5, None)  # type: ignore[attr-defined]
    assert record(0, users).rollback is None


def test_records_survive_the_file_and_only_the_first_culprit_reports(tmp_path: Path) -> None:
    attempt_log.append(tmp_path, 0, began=1.0)
    ends = [record(rank, raised(ValueError(f"no {rank}")), collectives=["#1"]) for rank in (2, 0)]
    assert attempt_log.record_failure(tmp_path, record(1, PeerGone(PEER)))
    assert [attempt_log.record_failure(tmp_path, end) for end in ends] == [True, False]
    with (tmp_path / attempt_log.ROWS).open("a") as file:
        file.write('{"attempt": 0, "ra\n')
    read = failed_ranks(tmp_path)
    assert [(end.rank, end.message, end.time) for end in read[:2]] == [
        (end.rank, end.message, end.time) for end in ends
    ]
    attempt_log.append(tmp_path, 0, began=2.0)
    assert failed_ranks(tmp_path) == [], "another launch"
    assert attempt_log.record_failure(tmp_path / "gone", ends[0])


def test_the_record_of_a_stuck_rank_holds_its_stack(tmp_path: Path) -> None:
    entered, leave = threading.Event(), threading.Event()

    def endless_loop_of_the_user() -> None:
        entered.set()
        leave.wait()

    thread = threading.Thread(target=endless_loop_of_the_user)
    thread.start()
    entered.wait()
    assert thread.ident is not None
    for step, words in ((3, "did not reach the end of its step within 4 s"), (None, "had not come to its first step")):
        run = RankRun(1, StopSignals(), has_launcher=False, folder=tmp_path / str(step), step=step)
        run.folder.mkdir()
        rank_failure.write_hard_end(run, thread.ident)
        (stuck,) = failed_ranks(run.folder)
        assert words in stuck.message
        assert "endless_loop_of_the_user" in stuck.traceback
    leave.set()
    thread.join()


# -- out of memory --------------------------------------------------------------------------------------------

CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.10 GiB of which 1 GiB is free. "
    "Process 4711 has 12.50 GiB memory in use. Including non-PyTorch memory, this process has 65.40 GiB memory in use. "
    "Of the allocated memory {used} GiB is allocated by PyTorch, and {held} is reserved by PyTorch but unallocated. If "
    "reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
)


def config_of(*overrides: str) -> Any:
    sections = {"parallel": {"data": 4}, "train": {"steps": 3, "global_batch_size": 24}}
    return load_config(sections, list(overrides))


def test_advice_is_of_this_config_and_nothing_that_is_done_already() -> None:
    lines = memory_advice(config_of(), CUDA.format(used="48.00", held="14.30 GiB"), 7).splitlines()
    assert lines == [
        "out of memory in step 7; what takes less:",
        "  - other processes hold 12.50 GiB of this device: `nvidia-smi` names them",
        "  - 14.30 GiB are reserved in pieces too small: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "  - train.activation_checkpoint=full: a block's activations are computed again in backward",
        "  - more schedule.microbatches (now 1): fewer samples at a time, the same batch",
        "  - train.precision=bf16: activations of half the size",
        "  - parallel.zero.stage=1 (now 0): more is sharded over 4 data ranks",
        "  - a larger parallel.tensor.size (now 1) or parallel.pipeline.size (now 1)",
    ]
    used = ["train.activation_checkpoint=full", "parallel.zero=3", "schedule.microbatches=6", "train.precision=bf16"]
    text = memory_advice(config_of(*used), CUDA.format(used="60", held="800.00 MiB"), 7)
    for absent in ("activation_checkpoint", "zero.stage", "microbatches", "precision", "expandable_segments"):
        assert absent not in text
    before = memory_advice(config_of("parallel.strategy=sgp"), "out of memory", None)
    assert before.startswith("out of memory while the model was made or loaded")
    assert "activations" not in before
    assert "zero" not in before
