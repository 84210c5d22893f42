"""Processes that are not of a group try to take part in it, and ranks that cannot reach each other."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import socket
import struct
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import grid, run_ranks

from colossus.comm import collectives, shared_memory
from colossus.comm.links import Links
from colossus.comm.shared_memory import channel_for
from colossus.context.parallel_context import ParallelContext

pytestmark = pytest.mark.skipif(not Path("/proc/net/unix").exists(), reason="abstract sockets are Linux's")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

NOBODY = 65534
NEW_NETWORK = 0x40000000


def listening() -> list[bytes]:
    """Addresses of this process's own abstract sockets."""
    mine = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            mine.add(os.readlink(f"/proc/self/fd/{number}"))
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [
        b"\0" + row[7][1:].encode()
        for row in rows
        if len(row) == 8 and row[7].startswith("@colossus-") and f"socket:[{row[6]}]" in mine
    ]


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


def intruder(addresses: list[bytes], payload: bytes) -> Callable[[], None]:
    def connect() -> None:
        for address in addresses:
            stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            stream.connect(address)
            stream.sendall(payload)
            kept.append(stream)

    kept: list[socket.socket] = []
    return connect


def at_exchange(number: int, act: Callable[[], Any]) -> None:
    """Do something between the steps in which a group is made: before its n-th exchange of objects."""
    real, calls = shared_memory.all_gather_object, itertools.count(1)

    def exchange(value: Any, group: Any) -> Any:
        if next(calls) == number:
            act()
        return real(value, group)

    shared_memory.all_gather_object = exchange


def _attacked(context: ParallelContext, user: int | None) -> tuple[list[str], float]:
    children: list[int] = []
    #: as rank 1 of its group, and that its slot is filled for the first collective: a sum of one float64
    payload = bytes([1]) + struct.pack("<QQQ", 1, 8, 1) * 3
    if context.rank == 0:
        at_exchange(2, lambda: children.append(forked(intruder(listening(), payload), user)))
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            group = context.group("tensor")
            one = torch.tensor([1.0 + context.rank], dtype=torch.float64)
            total = collectives.all_reduce(one, group).wait().item()
            used = channel_for(one, group) is not None
        assert used
        return [str(item.message) for item in caught], total
    finally:
        end(children)


@pytest.mark.parametrize("user", [pytest.param(NOBODY, marks=needs_root), None])
def test_who_is_not_of_the_group_is_dropped_and_the_sum_is_right(user: int | None) -> None:
    ranks = run_ranks(2, _attacked, user, timeout=20)
    assert [total for _, total in ranks] == [3.0, 3.0]
    told = ranks[0][0]
    assert len(told) == 1, told
    expected = f"user {os.geteuid() if user is None else user} connected to a group of ranks it does not belong to"
    assert expected in told[0]
    assert ranks[1][0] == []


def _attacked_links(context: ParallelContext, user: int | None) -> float:
    children: list[int] = []
    payload = bytes([1]) + struct.pack("<QQQQ", 1, 0, 64, 0)
    if context.rank == 0:
        at_exchange(2, lambda: children.append(forked(intruder(listening(), payload), user)))
    try:
        links = Links(context.group("pipeline"), [(1, 0)], torch.device("cpu"))
        if context.rank == 1:
            links.send(0, [torch.full((3,), 7.0)], "number")
            return 7.0
        assert not links.takes_early  # shared memory is used all the same
        return links.receive(1, [torch.empty(3)], "number").wait()[0].mean().item()
    finally:
        end(children)


@pytest.mark.parametrize("user", [pytest.param(NOBODY, marks=needs_root), None])
@pytest.mark.filterwarnings("ignore:.*does not belong to:RuntimeWarning")
def test_links_take_messages_of_the_group_only(user: int | None) -> None:
    assert run_ranks(2, _attacked_links, user, plan=grid(pipeline=2), timeout=20) == [7.0, 7.0]


def _impostor(context: ParallelContext, user: int | None) -> tuple[list[str], float]:
    """Somebody else listens where rank 1 looks for rank 0."""
    children: list[int] = []
    real, address = shared_memory.all_gather_object, f"\0colossus-impostor-{os.getpid()}"

    def listen() -> None:
        door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        door.bind(address)
        door.listen(8)

        def answer() -> None:
            with suppress(OSError):
                while True:
                    stream, _ = door.accept()
                    stream.sendall(bytes(range(32)))
                    kept.append(stream)

        threading.Thread(target=answer, daemon=True).start()

    kept: list[socket.socket] = []

    def exchange(value: Any, group: Any) -> Any:
        answers = real(value, group)
        if context.rank == 1 and isinstance(value, tuple) and not children:
            children.append(forked(listen, user))
            answers[0] = (address, *answers[0][1:])
        return answers

    shared_memory.all_gather_object = exchange
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            group = context.group("tensor")
            total = collectives.all_reduce(torch.tensor([1.0 + context.rank]), group).wait().item()
        assert channel_for(torch.zeros(1), group) is None
        return [str(item.message) for item in caught], total
    finally:
        end(children)


@pytest.mark.parametrize("user", [pytest.param(NOBODY, marks=needs_root), None])
def test_ranks_do_not_talk_to_somebody_who_listens_in_the_place_of_one(user: int | None) -> None:
    ranks = run_ranks(2, _impostor, user, timeout=20)
    assert [total for _, total in ranks] == [3.0, 3.0]
    assert "of rank 0 of the group" in ranks[1][0][0]


def _apart(context: ParallelContext) -> float:
    group = context.group("tensor")
    if context.rank == 1 and ctypes.CDLL(None, use_errno=True).unshare(NEW_NETWORK):
        pytest.fail(os.strerror(ctypes.get_errno()))
    began = time.monotonic()
    total = collectives.all_reduce(torch.tensor([1.0 + context.rank]), group).wait().item()
    assert channel_for(torch.zeros(1), group) is None
    assert time.monotonic() - began < 5
    return total


@needs_root
def test_ranks_in_network_namespaces_of_their_own_fall_back() -> None:
    """As containers that share memory (``docker --ipc=host``) and no network."""
    assert run_ranks(3, _apart, timeout=20) == [6.0] * 3
