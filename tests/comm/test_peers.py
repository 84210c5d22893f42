"""Links between replicas: what is sent comes whole, nobody waits to send, strangers and deaths are seen."""

from __future__ import annotations

import os
import resource
import selectors
import signal
import socket
import struct
import time
import warnings
from typing import cast

import pytest
import torch
from helpers.ranks import grid, run_ranks

from colossus.comm import accounting, door
from colossus.comm.objects import all_gather_object
from colossus.comm.peer_wire import HEADER_BYTES, HELLO_BYTES, Header, WireError, hello, read_hello
from colossus.comm.peers import PeerGone, PeerLinks
from colossus.context.local_ranks import run_local_ranks
from colossus.context.parallel_context import ParallelContext

MOST = 1 << 23


def _exchange(context: ParallelContext) -> dict[str, object]:
    group = context.group("data")
    links, me = PeerLinks(group, MOST, 20.0), group.index
    others = [index for index in range(group.size) if index != me]
    sizes = [0, 1, 12345, 4 << 20]
    with accounting.count() as moved:
        for number, size in enumerate(sizes):
            data = links.buffer(size)
            data.fill_(me * 16 + number)
            links.send(others, 3, number, data, struct.pack("<d", me + 0.5), owned=True)
    seen = []
    for source in reversed(others):
        for number in (3, 0, 2, 1):  # in any order
            message = links.receive(source, 3, number)
            right = message.data.numel() == sizes[number] and bool((message.data == source * 16 + number).all())
            seen.append(right and struct.unpack("<d", message.meta)[0] == source + 0.5)
            links.release(message.data)
    again = links.buffer(12345)
    links.send((me + 1) % group.size, 4, 7, again)
    found = []
    while not found:
        links.wait(1.0)
        found = links.take(4)
    links.close()
    return dict(
        seen=seen,
        sent=links.bytes_sent,
        counted=moved.bytes("data", "send"),
        took=[(m.source, m.number) for m in found],
    )


def test_messages_of_any_size_come_whole_between_all() -> None:
    for index, result in enumerate(run_ranks(3, _exchange, plan=grid(data=3))):
        assert result["seen"] == [True] * 8
        assert result["counted"] == 2 * (1 + 12345 + (4 << 20))
        assert result["sent"] == result["counted"] + 12345
        assert result["took"] == [((index - 1) % 3, 7)]


def _strangers(context: ParallelContext) -> list[str]:
    group = context.group("data")
    links = PeerLinks(group, 1000, 10.0)
    told = []
    if group.index == 0:
        connections = links._connections
        address, key = tuple(connections._addresses[0]), connections._key
        good = hello(key, 1, 0)
        for bad in (b"GET / HTTP/1.1\r\n\r\n" * 9, hello(b"x" * 32, 1, 0), good[:-1] + b"?", hello(key, 0, 0)):
            with socket.create_connection(address) as stream:
                stream.sendall(bad)
                stream.settimeout(5.0)
                told.append(repr(_until_closed(stream)))
    all_gather_object(0, group)
    links.send([1 - group.index], 1, 1, torch.arange(10, dtype=torch.uint8))
    told.append(str(links.receive(1 - group.index, 1, 1).data.tolist()))
    told.append(str(links.gone))
    links.close()
    return told


def _until_closed(stream: socket.socket) -> bytes:
    try:
        return stream.recv(10)
    except ConnectionResetError:
        return b""


def test_strangers_are_dropped_and_change_nothing() -> None:
    first, second = run_ranks(2, _strangers, plan=grid(data=2))
    assert first == ["b''"] * 4 + second
    assert second == [str(list(range(10))), "{}"]


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _crowd(context: ParallelContext) -> dict[str, object]:
    """The first rank is connected to by many that say nothing, and may open no file for a while."""
    group, files = context.group("data"), []
    found: dict[str, object] = {}
    for number in range(4):
        links = PeerLinks(group, 1000, 10.0)
        links.send(1 - group.index, 1, number)
        links.receive(1 - group.index, 1, number)
        links.close()
        files.append(_open_files())
    found["files"] = files[-1] - files[1]

    door.GREETING_SECONDS, door._PAUSE_SECONDS = 1.0, 0.1
    links = PeerLinks(group, 1000, 10.0)
    listener, before = links._connections._incoming, _open_files()
    if group.index == 0:
        silent = [socket.create_connection(listener.address) for _ in range(40)]
        for stream in silent[:20]:  # at most 20 at a time
            stream.settimeout(10.0)
            found["oldest"] = _until_closed(stream)
        found["taken in"] = _open_files() - len(silent) - before
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = os.dup(0)
        os.close(most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    all_gather_object(0, group)
    if group.index == 0:
        deadline = time.monotonic() + 10.0
        while not listener.door.is_paused and time.monotonic() < deadline:
            time.sleep(0.002)
        found["paused"] = listener.door.is_paused
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for stream in silent[20:]:  # their time is over
            stream.settimeout(10.0)
            found["last"] = _until_closed(stream)
            stream.close()
        found["came"] = links.receive(1, 1, 0).number
        links.send(1, 1, 1)
    else:
        links.send(0, 1, 0)
        found["came"] = links.receive(0, 1, 1).number
    connections = links._connections
    selector = cast("selectors.EpollSelector", connections._selector)
    kept = [connections._wake._read, connections._wake._write, selector.fileno(), listener._listener.fileno()]
    child = os.fork()
    if not child:
        os._exit(sum(map(_is_open, kept)))
    found["child"] = os.waitpid(child, 0)[1]
    links.close()
    return found


def _is_open(file: int) -> bool:
    return os.path.exists(f"/proc/self/fd/{file}")


def test_a_crowd_of_strangers_and_a_system_without_files() -> None:
    first, second = run_ranks(2, _crowd, plan=grid(data=2))
    assert first.pop("taken in") <= 20
    assert first == {"files": 0, "oldest": b"", "paused": True, "last": b"", "came": 0, "child": 0}
    assert second == {"files": 0, "came": 1, "child": 0}


def test_the_wire_checks_lengths_and_keys() -> None:
    key = b"k" * 32
    assert len(hello(key, 2, 5)) == HELLO_BYTES
    assert read_hello(hello(key, 2, 5), key, 5, 6) == 2
    for raw, to, ranks in ((hello(key, 2, 5), 4, 6), (hello(key, 2, 5), 5, 2), (hello(b"o" * 32, 2, 5), 5, 6)):
        with pytest.raises(WireError):
            read_hello(raw, key, to, ranks)
    header = Header(7, -3, 12, 1000)
    assert len(header.pack()) == HEADER_BYTES
    assert Header.unpack(header.pack(), 1000) == header
    with pytest.raises(WireError, match=r"12 \+ 1000 bytes, where at most 4096 \+ 999"):
        Header.unpack(header.pack(), 999)


def _death(rank: int, sends_first: bool) -> str:
    context = ParallelContext(grid(data=3), rank)
    links = PeerLinks(context.group("data"), MOST, 30.0)
    all_gather_object(0, context.group("data"))
    if rank == 2:
        if sends_first:
            links.send([0, 1], 1, 0, torch.ones(MOST, dtype=torch.uint8))
            while links.backlog(0) or links.backlog(1):
                time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    if sends_first:
        assert links.receive(2, 1, 0).data.sum().item() == MOST  # what it had sent before comes
    else:
        links.send(2, 1, 0, torch.ones(10, dtype=torch.uint8))
        time.sleep(0.2)
        links.send(2, 1, 1, torch.ones(10, dtype=torch.uint8))
    with pytest.raises(PeerGone) as caught:
        links.receive(2, 1, 1)
    links.send(1 - rank, 1, 5)  # the living go on
    assert links.receive(1 - rank, 1, 5).source == 1 - rank
    links.close()
    return str(caught.value)


@pytest.mark.parametrize("sends_first", [True, False])
def test_a_death_is_told_to_who_waits_and_the_others_go_on(sends_first: bool) -> None:
    from colossus.context.local_ranks import RanksFailed

    with pytest.raises(RanksFailed) as failed:
        run_local_ranks(3, lambda rank: _death(rank, sends_first), patience=30.0, collective_timeout=30.0)
    assert dict(failed.value.exit_codes) == {2: -9}, failed.value.tracebacks
    assert not failed.value.tracebacks


def _early_end(context: ParallelContext) -> int:
    """The first rank sends all and ends, while the others still send to it and read."""
    group = context.group("data")
    links, me = PeerLinks(group, MOST, 10.0), group.index
    others = [index for index in range(group.size) if index != me]
    for number in range(20):
        links.send(others, 1, number, torch.full((100_000,), number, dtype=torch.uint8))
        if me == 0:
            continue
        time.sleep(0.01)
    if me == 0:
        links.close()
        return 0
    total = sum(int(links.receive(0, 1, number).data[0]) for number in range(20))
    assert not links.gone
    links.close()
    return total


def test_a_rank_that_ends_early_has_not_died() -> None:
    with warnings.catch_warnings():
        assert run_ranks(3, _early_end, plan=grid(data=3)) == [0, 190, 190]
