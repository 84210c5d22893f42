"""The servers that a user's own loop talks to: those of the launcher, or a thread in each rank."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from dataclasses import dataclass

from torch import distributed as dist

from colossus.comm.objects import all_gather_object
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import current_context
from colossus.context.world import launched_ranks
from colossus.server import environment
from colossus.server.client import Servers
from colossus.server.local_server import LocalServer
from colossus.server.rpc_client import RpcClient

#: workers of loops of the user's own, at servers that a strategy uses, too: this plus the rank
_FIRST_WORKER = 1 << 20
#: for which a rank waits for others at the end, before its server ends
_PATIENCE_SECONDS = 20.0


@dataclass
class _Joined:
    """
    Attributes:
        process: which has joined; a fork of it has not.
        place: (rank, number of ranks).
    """

    process: int
    place: tuple[int, int]
    servers: Servers
    own: LocalServer | None


_lock = threading.Lock()
_joined: _Joined | None = None


def servers_of_run() -> Servers:
    """Joins the servers when it is called first: collective then, unless a launcher has started the servers.

    Raises:
        ValueError: processes were started that are not joined, or the ranks are no longer those that have joined.
    """
    global _joined
    with _lock:
        group = _group()
        place = (group.index, group.size)
        if _joined is None or _joined.process != os.getpid():
            _joined = _join(group)
            atexit.register(close)
        elif _joined.place != place:
            raise ValueError(
                f"the servers were joined by rank {_joined.place[0]} of {_joined.place[1]}, which is rank {place[0]} "
                f"of {place[1]} now: call colossus.server.close() on all ranks before the ranks change"
            )
        return _joined.servers


def close() -> None:
    """Leave the servers; the tensors that were made are gone. On all ranks. It is called at the end of a process, too.

    A server that is a thread of this rank ends when the other ranks have left it.
    """
    global _joined
    with _lock:
        joined, _joined = _joined, None
    if joined is None or joined.process != os.getpid():
        return
    atexit.unregister(close)
    joined.servers.close()
    if joined.own is not None:
        has_failed = sys.exception() is not None or hasattr(sys, "last_value")  # others may wait for this rank then
        deadline = time.monotonic() + (0.0 if has_failed else _PATIENCE_SECONDS)
        while joined.own.handler.num_gone < joined.place[1] and time.monotonic() < deadline:
            time.sleep(0.005)
        joined.own.close()


def _join(group: AxisGroup) -> _Joined:
    own: LocalServer | None = None
    first = 0
    if environment.is_given():
        given = environment.read()
        endpoints, token, first = given.endpoints, given.token, _FIRST_WORKER
    else:
        token = all_gather_object(environment.new_token(), group)[0]
        own = LocalServer(group.index, token, {})
        endpoints = all_gather_object(own.endpoint, group)
    workers = [first + rank for rank in range(group.size)]
    clients: list[RpcClient] = []
    try:
        for endpoint in endpoints:
            clients.append(RpcClient(endpoint, token, workers[group.index]))
    except BaseException:
        for client in clients:
            client.close()
        if own is not None:
            own.close()
        raise
    return _Joined(os.getpid(), (group.index, group.size), Servers(clients, workers[group.index], workers), own)


def _group() -> AxisGroup:
    """All ranks."""
    context = current_context()
    if context.world_size > 1:
        return context.group(context.grid.names)
    started, rank = (os.environ.get(name, default) for name, default in (("WORLD_SIZE", "1"), ("RANK", "0")))
    if environment.is_given() and not dist.is_initialized() and started.isdecimal() and rank.isdecimal():
        return AxisGroup(("world",), tuple(range(int(started))), int(rank), None)  # nothing has to be exchanged
    return launched_ranks("colossus.server")
