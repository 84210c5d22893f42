"""The servers of a run, as a rank is connected to them: those of the launcher, or some that the first rank starts."""

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
    """Args:
        own: servers that this rank has started.
        timeout_seconds: for which calls under way, and other ranks, are waited for at the end.

    Attributes:
        servers: of the run.
    """

    def __init__(self, servers: Servers, own: Sequence[ServerProcess], timeout_seconds: float) -> None:
        self.servers, self._own, self._timeout = servers, own, timeout_seconds
        self._is_closed = False
        atexit.register(self.close)  # a loop of the user's own may end without `Engine.close`

    def close(self) -> None:
        """Say goodbye; servers that this rank has started end once all others have."""
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
    """Collective over all ranks. `colossus launch` has started servers, and says where they are; where nothing does
    (torchrun, srun, processes of one's own) the first rank starts them, as its children.

    Args:
        num_servers: None: as many as there are, and where there are none, one.
        workers: ranks that hold what this one holds, one of each replica.

    Raises:
        ValueError: there are others than the config says.
    """
    own: Sequence[ServerProcess] = ()
    if has_servers():
        endpoints, token = read_environment()
    else:
        token = new_token()
        if context.rank == 0:
            own = start_servers(num_servers or 1, token)
        found = [server.endpoint for server in own], token
        endpoints, token = broadcast_object(found, context.group(context.grid.names), 0)
    if num_servers is not None and len(endpoints) != num_servers:
        raise ValueError(
            f"parallel.strategy.servers = {num_servers}, but the environment ({SERVERS}) names "
            f"{len(endpoints)}: those of another run?"
        )
    timeout = context.timeout.total_seconds()
    clients = [RpcClient(endpoint, token, context.rank, timeout, on_progress) for endpoint in endpoints]
    return ServerConnection(Servers(clients, context.rank, workers), own, timeout)
