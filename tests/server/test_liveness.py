"""Who is gone, who is slow, and who comes back."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers.server_handlers import Adder

from colossus.server import entrance, segments, wire
from colossus.server.connect import greet
from colossus.server.environment import new_token
from colossus.server.rpc import Refused, RpcClient, RpcServer, ServerGone

TOKEN = new_token()


@contextmanager
def serving(**options: Any) -> Iterator[tuple[Adder, RpcServer]]:
    handler = Adder(5000)
    server = RpcServer(handler.handle, TOKEN, on_gone=handler.on_gone, **options)
    try:
        yield handler, server
    finally:
        server.close()


def until(true: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_worker_killed_in_the_midst_of_its_requests() -> None:
    with serving(reconnect_seconds=0.2) as (handler, server):
        child = os.fork()
        if not child:
            try:
                signal.alarm(20)
                client = RpcClient(server.endpoint, TOKEN, 3)
                for number in range(100_000):
                    client.call("add", {"number": number}, [torch.ones(5000, dtype=torch.float64)])
            finally:
                os._exit(1)
        until(lambda: len(handler.times) > 20)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        until(lambda: handler.gone)
        assert handler.gone == [(3, "its connection was lost, and not made again in 0.2 s")]
        assert set(handler.times.values()) == {1}
        assert list(handler.times) == [f"3 {number}" for number in range(len(handler.times))]
        assert torch.equal(handler.total, torch.full_like(handler.total, len(handler.times)))
        # and one that starts in its place
        client = RpcClient(server.endpoint, TOKEN, 3)
        assert client.call("total").wait(10).header["gone"] == [[3, handler.gone[0][1]]]
        client.close()
        until(lambda: len(handler.gone) == 2)
        assert handler.gone[1] == (3, None)


@pytest.mark.long
def test_two_clients_of_one_number() -> None:
    with serving(reconnect_seconds=30.0) as (_, server):
        first = RpcClient(server.endpoint, TOKEN, 1)
        with pytest.raises(Refused, match="refused worker 1: a client of worker 1 is connected already"):
            RpcClient(server.endpoint, TOKEN, 1)
        assert first.call("echo", {"a": 1}).wait(10).header == {"a": 1}
        # as if it had died: a greeting of another takes its place, and it hears of that when it comes back
        hello = wire.Hello.make(2, secrets.token_bytes(16), is_new=True, takes_segments=False)
        greet(server.endpoint, TOKEN, hello, 10.0)[0].close()
        until(lambda: 2 in server._sessions and server._sessions[2].connection is None)
        second = RpcClient(server.endpoint, TOKEN, 2)
        assert second.call("total").wait(10).header["gone"] == [[2, "another client has taken its number"]]
        with pytest.raises(Exception, match="it has given up worker 2: another client has taken its number"):
            greet(
                server.endpoint,
                TOKEN,
                wire.Hello.make(2, hello.incarnation, is_new=False, takes_segments=False),
                10.0,
            )
        second.close()
        first.close()


@pytest.mark.long
def test_a_silent_worker_is_given_up_and_a_quiet_one_is_not() -> None:
    with serving(timeout_seconds=2.5) as (handler, server):
        quiet = RpcClient(server.endpoint, TOKEN, 0)
        hello = wire.Hello.make(7, secrets.token_bytes(16), is_new=True, takes_segments=False)
        stream, _ = greet(server.endpoint, TOKEN, hello, 10.0)
        until(lambda: handler.gone)
        assert handler.gone == [(7, "it gave no sign of life for 2.5 s")]
        assert quiet.call("echo").wait(10).header == {}
        stream.close()
        quiet.close()


@pytest.mark.long
def test_a_slow_server_is_waited_for_and_a_silent_one_is_not() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    silent = dict(index=1, host="127.0.0.1", port=listener.getsockname()[1], unix=None, host_id="", process=os.getpid())

    def welcome() -> None:
        stream, _ = listener.accept()
        challenge, told = wire.make_challenge()
        stream.sendall(told)
        hello = wire.Hello.unpack(stream.recv(wire.HELLO_BYTES), TOKEN, challenge)
        stream.sendall(wire.Welcome.pack(wire.WELCOME, False, "", TOKEN, hello))
        while stream.recv(1 << 16):
            pass

    threading.Thread(target=welcome, daemon=True).start()
    with serving() as (_, server), listener:
        slow, none = (RpcClient(endpoint, TOKEN, 0, 3.0) for endpoint in (server.endpoint, silent))
        asleep = slow.call("sleep", {"seconds": 3.6})
        began = time.monotonic()
        with pytest.raises(
            ServerGone,
            match=r"server 1 at 127\.0\.0\.1:\d+ \(process \d+\) is gone: it gave no sign of life for 3 s \(the last "
            r"sign of life came 3\.\d s ago\)",
        ):
            none.call("echo").wait(10)
        assert time.monotonic() - began < 5.0
        assert not asleep.is_done()
        asleep.wait(10)
        slow.close()
    with pytest.raises(ValueError, match="timeout_seconds = 1: "):
        RpcClient(silent, TOKEN, 0, 1.0)


def test_a_server_that_is_closed_says_so() -> None:
    with serving() as (handler, server):
        client = RpcClient(server.endpoint, TOKEN, 0)
        call = client.call("sleep", {"seconds": 0.2})
        until(lambda: handler.is_asleep)
        later = client.call("echo")
    call.wait(10)  # it was at work
    with pytest.raises(ServerGone, match="it was closed") as error:
        later.wait(10)
    assert error.value.index == 0
    assert error.value.last_sign is not None
    client.close()


def test_progress_is_told() -> None:
    with serving() as (_, server):
        moved: list[int] = []
        client = RpcClient(server.endpoint, TOKEN, 0, on_progress=lambda: moved.append(1))
        for _ in range(3):
            client.call("echo").wait(10)
        client.close()
        assert len(moved) == 3


# -- where the system has less to offer -----------------------------------------------------------------------------


def test_segments_and_their_pool() -> None:
    pool = segments.SegmentPool(1 << 20)
    first, second = pool.take(100_000), pool.take(500_000)
    assert first is not None
    assert second is not None
    assert pool.take(600_000) is None  # no room
    pool.give_back(first)
    assert pool.take(90_000) is first
    pool.give_back(second)
    assert pool.take(600_000) is not None  # in the place of the second
    assert pool.take_dropped() == [second.number]
    assert pool.take_dropped() == []
    pool.close()
    assert pool.take(1) is None


def run_echoes(server: RpcServer, **options: Any) -> RpcClient:
    client = RpcClient(server.endpoint, TOKEN, 0, **options)
    values = [torch.arange(20_000.0), torch.arange(3), torch.arange(100_000, dtype=torch.int16)]
    calls = [client.call("echo", {}, [value, value[::2]]) for value in values]
    for value, call in zip(values, calls, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(call.wait(10).arrays, (value, value[::2]), strict=True))
    return client


def test_without_shared_memory() -> None:
    with serving() as (_, server):
        client = run_echoes(server)
        assert client._segments._segments
        client.close()
        client = run_echoes(server, shared_memory=False)
        assert not client._segments._segments
        assert not server._sessions[0].segments._segments
        client.close()


def test_without_memory_that_has_no_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr(entrance, "_has_abstract_sockets", lambda: False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with serving() as (_, server):
        (folder,) = tmp_path.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert server.endpoint["unix"] == str(folder / "socket")
        client = run_echoes(server)
        assert client._segments._segments
        assert list(tmp_path.iterdir()) == [folder]  # the segments have no names
        client.close()
    assert not list(tmp_path.iterdir())


def test_a_receiver_that_may_open_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then what was to go through shared memory goes through the socket."""
    with serving() as (handler, server):
        real, failed = segments.SegmentMap.add, []

        def add(self: segments.SegmentMap, described: object, descriptor: int) -> None:
            if not failed or self is failed[0]:
                failed.append(self)
                os.close(descriptor)
                raise OSError("too many open files")
            real(self, described, descriptor)

        monkeypatch.setattr(segments.SegmentMap, "add", add)
        run_echoes(server).close()
        assert len(failed) == 1
        until(lambda: handler.gone)
        assert handler.gone == [(0, None)]
