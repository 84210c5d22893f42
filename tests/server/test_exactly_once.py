"""Each request is applied once, whatever becomes of the connections."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from helpers.cutting_proxy import CuttingProxy
from helpers.server_handlers import Adder

from colossus.server.environment import new_token
from colossus.server.rpc import RpcClient, RpcServer

TOKEN = new_token()
#: goes through the socket; through shared memory where there is some
SMALL, LARGE = 3, 5001
#: and requests of each worker
SIZES = pytest.mark.parametrize(
    ("length", "count"),
    [
        (SMALL, 200),
        (LARGE, 60),
        pytest.param(SMALL, 2000, marks=pytest.mark.long),
        pytest.param(LARGE, 1000, marks=pytest.mark.long),
    ],
)


@contextmanager
def adding(length: int) -> Iterator[tuple[Adder, RpcServer]]:
    handler = Adder(length)
    server = RpcServer(handler.handle, TOKEN, on_gone=handler.on_gone)
    try:
        yield handler, server
    finally:
        server.close()


def add_many(client: RpcClient, count: int, length: int) -> None:
    """Numbers 0 to count - 1, some of them answered with the sum so far."""
    calls = []
    for number in range(count):
        pull = number % 7 == 0
        into = [torch.empty(length, dtype=torch.float64)] if pull and number % 2 else None
        value = torch.full((length,), float(number + 1), dtype=torch.float64)
        calls.append(client.call("add", {"number": number, "pull": pull}, [value], into))
        value.fill_(-1e9)  # the caller's again
    for number, call in enumerate(calls):
        reply = call.wait(60)
        if number % 7 == 0:
            # all of one worker, in their order, and whatever others have added
            assert (reply.arrays[0] >= (number + 1) * (number + 2) / 2).all()
            assert (reply.arrays[0] == reply.arrays[0][0]).all()


def check(handler: Adder, workers: int, count: int) -> None:
    assert handler.times == {f"{worker} {number}": 1 for worker in range(workers) for number in range(count)}
    expected = torch.full_like(handler.total, workers * count * (count + 1) / 2)
    assert torch.equal(handler.total, expected)


@SIZES
def test_through_a_way_that_breaks(length: int, count: int) -> None:
    workers = 2
    with adding(length) as (handler, server):
        proxies = [
            CuttingProxy(server.endpoint, seed, 30_000 if length == SMALL else 500 * length) for seed in range(workers)
        ]
        clients = [RpcClient(proxy.endpoint, TOKEN, worker) for worker, proxy in enumerate(proxies)]
        threads = [threading.Thread(target=add_many, args=(client, count, length)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for proxy, client in zip(proxies, clients, strict=True):
            proxy.most_bytes = None
            client.close()
            proxy.close()
        check(handler, workers, count)
        assert sum(proxy.num_cuts for proxy in proxies) > 1
        assert not handler.gone or all(reason is None for _, reason in handler.gone)


@SIZES
def test_local_connections_cut_at_random(length: int, count: int) -> None:
    """Both ends of the connections of two workers are closed under them."""
    workers = 2
    with adding(length) as (handler, server):
        clients = [RpcClient(server.endpoint, TOKEN, worker) for worker in range(workers)]
        threads = [threading.Thread(target=add_many, args=(client, count, length)) for client in clients]
        for thread in threads:
            thread.start()
        cuts, draw = 0, random.Random(5)
        while any(thread.is_alive() for thread in threads):
            ends = [client._connection for client in clients] + server._connections()
            with contextlib.suppress(OSError, AttributeError):
                draw.choice(ends).stream.shutdown(socket.SHUT_RDWR)
                cuts += 1
            time.sleep(draw.random() * 0.01)
        for client in clients:
            client.close()
        check(handler, workers, count)
        assert cuts > 1
