"""Ranks forked on this machine: results, tracebacks, and what counts as a hang."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch
from torch import distributed as dist

from colossus.context import local_ranks
from colossus.context.local_ranks import LocalRanks, RanksFailed, run_local_ranks


def test_ranks_are_joined_and_answer_in_order() -> None:
    def body(rank: int) -> float:
        x = torch.tensor([float(rank)])
        dist.all_reduce(x)
        return rank * 10 + x.item()

    assert run_local_ranks(3, body) == [3.0, 13.0, 23.0]


def test_variables_are_those_of_the_ranks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONE", "mine")
    names = ("ONE", "TWO")
    variables_of_ranks = run_local_ranks(
        1, lambda rank: list(map(os.environ.get, names)), variables={"ONE": "1", "TWO": "2"}
    )
    assert (variables_of_ranks, os.environ.get("TWO")) == ([["mine", "2"]], None)


def test_an_object_stays_between_calls() -> None:
    class Counter:
        def __init__(self, rank: int) -> None:
            self.total = rank

        def add(self, number: int) -> int:
            self.total += number
            return self.total

    with LocalRanks(2, Counter) as ranks:
        assert ranks.call("add", 5) == [5, 6]
        assert ranks.call("add", 1) == [6, 7]


def test_the_first_traceback_is_shown_and_codes_are_kept() -> None:
    def body(rank: int) -> None:
        dist.barrier()  # a rank that ends early must not end one that is still connecting to it
        if rank == 1:
            raise ValueError("rank one has failed")
        if rank == 2:
            os._exit(7)

    with pytest.raises(RanksFailed, match=r"rank 1 failed(?s:.*)ValueError: rank one has failed") as caught:
        run_local_ranks(3, body)
    assert (list(caught.value.tracebacks), caught.value.exit_codes, caught.value.silent) == ([1], {2: 7}, [])


def test_what_a_rank_cannot_answer_it_prints(capfd: pytest.CaptureFixture[str]) -> None:
    def leave(rank: int) -> None:
        if rank == 1:
            sys.exit("no more")
        os.close(_own_pipe())
        raise ValueError("unheard of")

    with pytest.raises(RanksFailed) as caught:
        run_local_ranks(2, leave)
    assert caught.value.exit_codes == {0: 1, 1: 1}
    errors = capfd.readouterr().err
    assert "ValueError: unheard of" in errors
    assert "OSError: [Errno 9]" in errors
    assert "no more" in errors


def test_a_rank_that_works_is_slow_and_one_that_does_not_is_hung() -> None:
    def works(rank: int) -> int:
        until = time.process_time() + 1.4
        while time.process_time() < until:
            pass
        return rank

    assert run_local_ranks(2, works, patience=1.0) == [0, 1]
    with pytest.raises(RanksFailed) as caught:
        run_local_ranks(2, lambda rank: time.sleep(60 * rank), patience=1.0)
    assert caught.value.silent == [1]


@pytest.mark.long
def test_processor_time_is_read_without_proc_too() -> None:
    """The children that run; ps has whole seconds on Linux."""

    def works(rank: int) -> float:
        until = time.process_time() + 2.5
        while time.process_time() < until:
            pass
        return local_ranks._seconds_by_ps([os.getppid()]) - local_ranks._seconds_by_ps([os.getpid()])

    before = local_ranks._seconds_by_ps([os.getpid()])
    of_parent = run_local_ranks(1, works)[0]
    assert abs(of_parent - before) <= 2.0


def test_ctrl_c_in_a_hook_of_a_fork_is_not_lost() -> None:
    program = """
import os, signal
from colossus.context.local_ranks import LocalRanks

os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
try:
    LocalRanks(1, str)
except KeyboardInterrupt:
    print("interrupted")
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (run.stdout, run.stderr) == ("interrupted\n", "")


def _own_pipe() -> int:
    """Return the descriptor of the pipe to the parent, which a function of the stack has."""
    frame = sys._getframe()
    while "pipe" not in frame.f_locals:
        assert frame.f_back is not None
        frame = frame.f_back
    return frame.f_locals["pipe"].fileno()
