"""Other users of the host, ranks that cannot reach each other, and processes that are forked of them."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import RankError, run_ranks

from colossus.comm import collectives, shared_memory
from colossus.comm.shared_memory import channel_for
from colossus.context.parallel_context import ParallelContext

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="memory without a name is Linux's")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

NOBODY = 65534


def forked(body: Callable[[], None], user: int | None) -> int:
    """A process of that user that runs ``body`` and stays."""
    ready, done = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)  # in any case: it must not outlive the tests
            if user is not None:
                os.setgroups([])
                os.setresgid(user, user, user)
                os.setresuid(user, user, user)
            body()
            os.write(done, b"1")
            signal.pause()
        finally:
            os._exit(1)
    os.close(done)
    assert os.read(ready, 1) == b"1"
    return process


def end(children: list[int]) -> None:
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def at_exchange(number: int, act: Callable[[], Any]) -> None:
    """Do something between the steps in which a group is made: before its n-th exchange of objects."""
    real, calls = shared_memory.all_gather_object, itertools.count(1)

    def exchange(value: Any, group: Any) -> Any:
        answers = real(value, group)
        if next(calls) == number:
            act(answers)
        return answers

    shared_memory.all_gather_object = exchange


def _spied_on(context: ParallelContext) -> tuple[list[str], float]:
    """Another user of the host looks for what the ranks make, while they make it."""
    children: list[int] = []
    told: list[str] = []

    def spy(offers: list[Any]) -> None:
        path, memory = offers[0]
        ready, done = os.pipe()

        def look() -> None:
            found = []
            for act in (
                lambda: socket.socket(socket.AF_UNIX).connect(path),
                lambda: os.listdir(Path(path).parent),
                lambda: os.open(f"/proc/{memory.process}/fd/{memory.descriptor}", os.O_RDWR),
            ):
                try:
                    act()
                    found.append("came in")
                except PermissionError:
                    found.append("refused")
            os.write(done, " ".join(found).encode())

        children.append(forked(look, NOBODY))
        told.append(os.read(ready, 100).decode())

    if context.rank == 1:
        at_exchange(1, spy)
    try:
        group = context.group("tensor")
        one = torch.tensor([1.0 + context.rank], dtype=torch.float64)
        total = collectives.all_reduce(one, group).wait().item()
        assert channel_for(one, group) is not None
        return told, total
    finally:
        end(children)


@needs_root
def test_the_kernel_keeps_other_users_out() -> None:
    (_, first), (told, second) = run_ranks(2, _spied_on, timeout=20)
    assert (first, second) == (3.0, 3.0)
    assert told == ["refused refused refused"]


def _forks(context: ParallelContext) -> float:
    """A process forked of a rank (a data loader's worker) does not keep its connections open."""
    group = context.group("tensor")
    collectives.all_reduce(torch.ones(1), group).wait()
    if context.rank == 1:
        forked(lambda: None, None)
        os._exit(9)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="Connection closed by peer: rank 1 is gone"):
        collectives.all_reduce(torch.ones(1), group).wait()
    return time.monotonic() - began


@pytest.mark.long
def test_a_forked_process_keeps_no_connection_open() -> None:
    with pytest.raises(RankError, match="rank 1 ---\ndied without a word") as caught:
        run_ranks(2, _forks, timeout=20)
    assert "rank 0" not in str(caught.value)
