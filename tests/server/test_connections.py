"""Calls at a server: how they are answered, and how they end whatever becomes of the connection."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers.cutting_proxy import CuttingProxy
from helpers.server_handlers import Adder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colossus.comm import net
from colossus.server.calls import Refused, Request, ServerGone
from colossus.server.process import new_token
from colossus.server.rpc_client import RpcClient
from colossus.server.rpc_server import RpcServer

TOKEN = new_token()


@contextmanager
def serving(length: int = 3, **options: Any) -> Iterator[tuple[Adder, RpcServer]]:
    handler = Adder(length)
    server = RpcServer(handler.handle, TOKEN, on_gone=handler.on_gone, **options)
    try:
        yield handler, server
    finally:
        server.close()


@pytest.fixture(scope="module")
def server() -> Iterator[RpcServer]:
    with serving() as (_, server):
        yield server


def until(true: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@contextmanager
def handling(handle: Callable[[Request], object]) -> Iterator[RpcServer]:
    server = RpcServer(handle, TOKEN)
    try:
        yield server
    finally:
        server.close()


# -- answers --------------------------------------------------------------------------------------------------


def test_replies_come_in_any_order_and_requests_in_theirs() -> None:
    requests: list[Request] = []

    def handle(request: Request) -> None:
        requests.append(request)
        if len(requests) == 3:
            for one in reversed(requests):
                threading.Thread(target=one.reply, args=({"number": one.header["number"]},)).start()

    with handling(handle) as server:
        client = RpcClient(server.endpoint, TOKEN, 0)
        calls = [client.call("wait", {"number": number}) for number in range(2)]
        with pytest.raises(TimeoutError):
            calls[0].result(0.05)
        calls.append(client.call("wait", {"number": 2}))
        assert [call.result(10).header["number"] for call in calls] == [0, 1, 2]
        assert [request.header["number"] for request in requests] == [0, 1, 2]
        client.close()


def test_a_refused_call() -> None:
    with handling(lambda request: request.fail(ValueError("no such tensor: 'w'"))) as server:
        client = RpcClient(server.endpoint, TOKEN, 0)
        for _ in range(2):
            with pytest.raises(Refused, match="server 0 refused to pull: no such tensor: 'w'"):
                client.call("pull").result(10)
        client.close()


def test_the_end_of_a_server_is_told() -> None:
    def handle(request: Request) -> None:
        if request.op == "fail":
            raise KeyError("lost")

    with handling(handle) as server:
        clients = [RpcClient(server.endpoint, TOKEN, worker) for worker in (0, 1)]
        waiting = clients[0].call("wait")
        clients[1].call("fail")
        with pytest.raises(ServerGone, match=r"server 0 at .* is gone: it has failed: KeyError: 'lost'"):
            waiting.result(10)
    with pytest.raises(ServerGone):
        clients[0].call("more")
    with pytest.raises(ServerGone):
        RpcClient(server.endpoint, TOKEN, 0)


def test_a_wrong_token_is_refused(server: RpcServer) -> None:
    with pytest.raises(Refused, match="token"):
        RpcClient(server.endpoint, new_token(), 0)


# -- cuts -----------------------------------------------------------------------------------------------------


def add_until_lost(client: RpcClient, length: int, counts: list[int]) -> None:
    """Numbers from 0 on, until the connection is lost: how many were answered, and how many sent."""
    calls = []
    try:
        for number in range(100_000):
            value = torch.full((length,), float(number + 1), dtype=torch.float64)
            calls.append(client.call("add", {"number": number}, [value]))
            value.fill_(-1e9)  # the caller's again
    except ServerGone:
        pass
    ends = [call.exception(20) for call in calls]
    are_answered = [end is None for end in ends]
    assert are_answered == sorted(are_answered, reverse=True)  # none is answered after one that is not
    assert all(end is None or isinstance(end, ServerGone) for end in ends)
    counts += [sum(are_answered), len(calls)]


@pytest.mark.parametrize("length", [3, 50_001])
def test_a_request_is_applied_at_most_once_whereever_the_connection_is_cut(length: int) -> None:
    with serving(length) as (handler, server):
        expected = 0.0
        for seed in range(8):
            proxy = CuttingProxy(server.endpoint, seed, 30_000 if length == 3 else 40 * 8 * length)
            counts: list[int] = []
            try:
                client = RpcClient(proxy.endpoint, TOKEN, seed)
            except (ServerGone, Refused):  # cut in its greeting
                proxy.close()
                continue
            add_until_lost(client, length, counts)
            until(lambda seed=seed: seed in dict(handler.gone))
            applied = [key for key in handler.times if key.startswith(f"{seed} ")]
            assert applied == [f"{seed} {number}" for number in range(len(applied))]  # in order, none left out
            assert counts[0] <= len(applied) <= counts[1]
            expected += len(applied) * (len(applied) + 1) / 2
            client.close()
            proxy.close()
        assert set(handler.times.values()) == {1}
        assert torch.equal(handler.total, torch.full_like(handler.total, expected))
        assert expected


# -- ends -----------------------------------------------------------------------------------------------------


def test_a_silent_worker_is_given_up_and_a_quiet_one_is_not() -> None:
    with serving(timeout_seconds=1.5) as (handler, server):
        quiet = RpcClient(server.endpoint, TOKEN, 0)
        silent = RpcClient(server.endpoint, TOKEN, 7)
        net.running_loop().call(lambda: [task.cancel() for task in silent._stream._tasks])
        until(lambda: handler.gone)
        assert handler.gone == [(7, "it gave no sign of life for 1.5 s")]
        assert quiet.call("echo").result(10).header == {}
        quiet.close()


def test_a_server_that_is_closed_says_so() -> None:
    with serving() as (handler, server):
        client = RpcClient(server.endpoint, TOKEN, 0)
        call = client.call("sleep", {"seconds": 0.2})
        until(lambda: handler.is_asleep)
        later = client.call("echo")
    call.result(10)  # it was at work
    with pytest.raises(ServerGone, match="it was closed") as error:
        later.result(10)
    assert error.value.index == 0
    client.close()
    with pytest.raises(ServerGone, match="nothing listens there"):
        RpcClient(server.endpoint, TOKEN, 0)


def test_a_server_that_is_closed_waits_for_workers_that_are_connected() -> None:
    with serving() as (_, server):
        client = RpcClient(server.endpoint, TOKEN, 0)
        closing = threading.Thread(target=server.close, args=(20.0,))
        closing.start()
        time.sleep(0.1)
        assert client.call("echo", {"a": 1}).result(10).header == {"a": 1}
        client.close()
        closing.join(5)
        assert not closing.is_alive()


DTYPES = [torch.float64, torch.bfloat16, torch.int16, torch.bool, torch.complex64, torch.uint8]


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=4),
    st.sampled_from(["new", "contiguous", "strided"]),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
def test_tensors_come_as_they_were_sent(server: RpcServer, kinds: list[Any], way: str) -> None:
    tensors = [(torch.rand(shape) * 9).to(dtype) for dtype, shape in kinds]
    into: list[torch.Tensor] | None = None
    if way != "new":
        into = [torch.zeros_like(tensor) for tensor in tensors]
    if way == "strided":
        into = [torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)[..., 0] for tensor in tensors]
    client = RpcClient(server.endpoint, TOKEN, 8)
    came = client.call("echo", {}, tensors, into).result(20).arrays
    client.close()
    assert [(x.dtype, x.shape) for x in came] == [(x.dtype, x.shape) for x in tensors]
    assert all(torch.equal(x, y) for x, y in zip(came, tensors, strict=True))
    assert into is None or all(x is y for x, y in zip(came, into, strict=True))
