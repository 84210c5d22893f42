"""Parameter servers for tests: threads of the first rank's process, where a run would start processes."""

from __future__ import annotations

from typing import Any

from colossus.data_parallel.servers import connection as server_connection
from colossus.server.rpc_server import RpcServer
from colossus.server.store import ShardStore


def start_servers(number: int, token: bytes) -> list[Any]:
    """As those of `colossus.server.process`, in this process."""
    stores = [ShardStore() for _ in range(number)]
    return [RpcServer(store.handle, token, index=index, on_gone=store.on_gone) for index, store in enumerate(stores)]


def in_threads() -> None:
    """Ranks that are forked from here on have their servers as threads of the first one."""
    server_connection.start_servers = start_servers
