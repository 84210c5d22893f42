"""A rank's connection to the servers of a run, which the launcher or the first rank has started."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Sequence

from colossus.comm.objects import broadcast_object
from colossus.context.parallel_context import ParallelContext
from colossus.server.client import Servers
from colossus.server.process import SERVERS, ServerProcess, has_servers, new_token, read_environment, start_servers
from colossus.server.rpc_client import RpcClient


class ServerConnection:
    """The connection of a rank to the servers of a run.

    Args:
        servers: the clients of all servers.
        own: the servers that this rank has started.
        timeout_seconds: the longest wait at the end for calls under way and for other ranks.

    Attributes:
        servers: the clients of all servers.
    """

    def __init__(self, servers: Servers, own: Sequence[ServerProcess], timeout_seconds: float) -> None:
        self.servers, self._own, self._timeout = servers, own, timeout_seconds
        self._is_closed = False
        atexit.register(self.close)  # a loop of the user's own may end without `Engine.close`

    def close(self) -> None:
        """Say goodbye; servers that this rank has started end once all other ranks have done so."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        has_failed = sys.exception() is not None or hasattr(sys, "last_value")  # others may wait for this rank then
        patience = 0.0 if has_failed else self._timeout
        self.servers.close(patience)
        for server in self._own:
            server.close(patience)


def connect(
    num_servers: int | None, context: ParallelContext, on_progress: Callable[[], None], workers: Sequence[int]
) -> ServerConnection:
    """Connect to the servers of the run. Collective over all ranks.

    `colossus launch` has started servers and set their addresses in the environment. Otherwise (torchrun, srun,
    processes of one's own) the first rank starts them as its children.

    Args:
        num_servers: the number of servers; None: as many as there are, or one where there are none.
        context: the ranks.
        on_progress: called whenever a reply has come.
        workers: the ranks along data that store the same parameters as this one.

    Raises:
        ValueError: the number of servers differs from that of the config.
    """
    own: Sequence[ServerProcess] = ()
    if has_servers():
        endpoints, token = read_environment()
    else:
        token = new_token()
        if context.rank == 0:
            own = start_servers(num_servers or 1, token)
        credentials = [server.endpoint for server in own], token
        endpoints, token = broadcast_object(credentials, context.group(context.grid.names), 0)
    if num_servers is not None and len(endpoints) != num_servers:
        raise ValueError(
            f"parallel.strategy.servers = {num_servers}, but the environment ({SERVERS}) names "
            f"{len(endpoints)}: those of another run?"
        )
    timeout = context.timeout.total_seconds()
    clients = [RpcClient(endpoint, token, context.rank, timeout, on_progress) for endpoint in endpoints]
    return ServerConnection(Servers(clients, context.rank, workers), own, timeout)
