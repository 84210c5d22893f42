"""Servers within this process, and the workers' views of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from colossus.server.client import Servers
from colossus.server.rpc_client import RpcClient
from colossus.server.rpc_server import RpcServer
from colossus.server.store import ShardStore

_TOKEN = b"t" * 32


@contextmanager
def local_servers(num_servers: int = 1, num_workers: int = 1) -> Iterator[list[Servers]]:
    """One `Servers` for each worker."""
    stores = [ShardStore() for _ in range(num_servers)]
    servers = [
        RpcServer(store.handle, _TOKEN, index=index, on_gone=store.on_gone) for index, store in enumerate(stores)
    ]
    workers = []
    try:
        for worker in range(num_workers):
            clients = [RpcClient(server.endpoint, _TOKEN, worker) for server in servers]
            workers.append(Servers(clients, worker, range(num_workers)))
        yield workers
    finally:
        for view in workers:
            view.close(5.0)
        for server in servers:
            server.close()


def made(workers: list[Servers], tensors: dict[str, Tensor], **options: object) -> None:
    """All workers make tensors, in an order in which the one with values comes last."""
    handles = [worker.create(tensors, **options) for worker in reversed(workers)]  # type: ignore[arg-type]
    for handle in handles:
        handle.wait()


def pulled(worker: Servers, name: str, like: Tensor) -> Tensor:
    into = torch.empty_like(like)
    worker.pull({name: into}).wait()
    return into
