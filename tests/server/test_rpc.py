"""Calls at a server: what is sent, how it is answered, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from colossus.server.environment import new_token
from colossus.server.messages import Refused, Request, ServerGone
from colossus.server.rpc_client import RpcClient
from colossus.server.rpc_server import RpcServer

TOKEN = new_token()


@contextmanager
def serving(handle: Callable[[Request], object]) -> Iterator[RpcServer]:
    server = RpcServer(handle, TOKEN)
    try:
        yield server
    finally:
        server.close()


def echo(request: Request) -> None:
    request.reply({"op": request.op, "worker": request.worker, **request.header}, request.arrays)


def test_a_call_is_answered() -> None:
    with serving(echo) as server:
        client = RpcClient(server.endpoint, TOKEN, worker=3)
        sent = [torch.arange(6.0, dtype=torch.float64).reshape(2, 3), torch.tensor(7), torch.empty(0, 4)]
        call = client.call("echo", {"a": [1, None, "x"]}, sent)
        sent[0].zero_()  # copied before
        reply = call.result(10)
        assert call.done()
        assert reply.header == {"op": "echo", "worker": 3, "a": [1, None, "x"]}
        assert torch.equal(reply.arrays[0], torch.arange(6.0, dtype=torch.float64).reshape(2, 3))
        assert [(x.shape, x.dtype) for x in reply.arrays] == [(x.shape, x.dtype) for x in sent]
        into = [torch.zeros(2, 3), torch.zeros((), dtype=torch.int64)]
        client.call("echo", {}, [torch.ones(2, 3), torch.tensor(9)], into).result(10)
        assert torch.equal(into[0], torch.ones(2, 3))
        assert into[1].item() == 9
        client.close()


def test_replies_come_in_any_order_and_requests_in_theirs() -> None:
    held: list[Request] = []

    def handle(request: Request) -> None:
        held.append(request)
        if len(held) == 3:
            for one in reversed(held):
                threading.Thread(target=one.reply, args=({"number": one.header["number"]},)).start()

    with serving(handle) as server:
        client = RpcClient(server.endpoint, TOKEN, 0)
        calls = [client.call("wait", {"number": number}) for number in range(2)]
        with pytest.raises(TimeoutError):
            calls[0].result(0.05)
        calls.append(client.call("wait", {"number": 2}))
        assert [call.result(10).header["number"] for call in calls] == [0, 1, 2]
        assert [request.header["number"] for request in held] == [0, 1, 2]
        client.close()


def test_a_refused_call_and_one_answered_twice() -> None:
    seen: list[str] = []

    def handle(request: Request) -> None:
        request.fail("no such tensor: 'w'")
        try:
            request.reply()
        except RuntimeError as error:
            seen.append(str(error))

    with serving(handle) as server:
        client = RpcClient(server.endpoint, TOKEN, 0)
        with pytest.raises(Refused, match="no such tensor: 'w'"):
            client.call("pull").result(10)
        with pytest.raises(Refused, match="no such tensor"):
            client.call("pull").result(10)
        assert "was answered already" in seen[0]
        client.close()


def test_the_end_of_a_server_is_told() -> None:
    def handle(request: Request) -> None:
        if request.op == "fail":
            raise KeyError("lost")

    with serving(handle) as server:
        clients = [RpcClient(server.endpoint, TOKEN, worker) for worker in (0, 1)]
        waiting = clients[0].call("wait")
        clients[1].call("fail")
        with pytest.raises(ServerGone, match=r"server 0 at .* is gone: it has failed: KeyError: 'lost'"):
            waiting.result(10)
    with pytest.raises(ServerGone):
        clients[0].call("more")
    with pytest.raises(ServerGone):
        RpcClient(server.endpoint, TOKEN, 0)


def test_a_wrong_token_is_refused() -> None:
    with serving(echo) as server, pytest.raises(Refused, match="token"):
        RpcClient(server.endpoint, new_token(), 0)
