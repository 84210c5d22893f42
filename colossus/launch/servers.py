"""The parameter servers of a run: how many, where they are, started by each node's launcher. No torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colossus.config import Config
from colossus.config.plans import strategy_options
from colossus.launch.outcome import ServerFailure
from colossus.server.process import SERVERS, TOKEN, ServerProcess, new_token, write_environment

if TYPE_CHECKING:
    from colossus.launch.nodes import Nodes

LOGS = "logs"
"""In the run folder: what servers print."""


def num_servers(config: Config, nnodes: int) -> int:
    """As many as the strategy's ``servers`` says, where it has that; None there: one on each node."""
    options: Any = strategy_options(config)
    if not hasattr(options, "servers"):
        return 0
    wanted: int | None = options.servers
    return nnodes if wanted is None else wanted


def servers_of_nodes(number: int, nnodes: int) -> list[list[int]]:
    """Of each node the indices of its servers: spread evenly, neighbours on the same node."""
    nodes: list[list[int]] = [[] for _ in range(nnodes)]
    for index in range(number):
        nodes[index * nnodes // number].append(index)
    return nodes


def describe_servers(number: int, nnodes: int) -> str:
    """``2 processes beside the workers, on 2 nodes``."""
    processes = f"{number} process{'' if number == 1 else 'es'} beside the workers"
    return processes if nnodes == 1 else f"{processes}, on {min(number, nnodes)} of {nnodes} nodes"


class Servers:
    """Of one launcher.

    Attributes:
        endpoints: of all servers of the run, by index.
    """

    def __init__(self) -> None:
        self.endpoints: Sequence[Mapping[str, Any]] = ()
        self._here: dict[int, ServerProcess] = {}
        self._token = b""
        self._failure: ServerFailure | None = None

    def start(self, number: int, folder: Path, timeout_seconds: float, nodes: Nodes | None) -> None:
        """Start those of this node, and learn where the others are. All nodes at once.

        Args:
            number: of the servers of the run.
            folder: the run folder.
            timeout_seconds: of silence after which a server gives up a worker.

        Raises:
            RuntimeError: when a server could not be started, on all nodes.
        """
        token = new_token().hex()
        if nodes is not None:
            token = nodes.from_first("servers/token", lambda: token)
        self._token, self._folder = bytes.fromhex(token), folder
        node, num_nodes, host = (0, 1, "127.0.0.1") if nodes is None else (nodes.node, nodes.num_nodes, nodes.address)
        problem = ""
        try:
            self._start(servers_of_nodes(number, num_nodes)[node], host, timeout_seconds)
        except (OSError, RuntimeError) as error:
            problem = f"a server could not be started on host {host}: {error}"
        mine: Any = ({index: server.endpoint for index, server in self._here.items()}, problem)
        every = [mine] if nodes is None else nodes.exchange("servers", mine)
        problems = [problem for _, problem in every if problem]
        if problems:
            raise RuntimeError("; ".join(problems))
        endpoints = {int(index): endpoint for found, _ in every for index, endpoint in found.items()}
        self.endpoints = [endpoints[index] for index in range(number)]

    def _start(self, indices: Sequence[int], host: str, timeout_seconds: float) -> None:
        for index in indices:  # all at once, and from the main thread, which lives as long as they
            log = self._log_of(index)
            log.parent.mkdir(parents=True, exist_ok=True)
            self._here[index] = ServerProcess(index, self._token, host=host, timeout_seconds=timeout_seconds, log=log)
        for server in self._here.values():
            server.wait_until_ready()

    def _log_of(self, index: int) -> Path:
        return self._folder / LOGS / f"server{index}.log"

    @contextmanager
    def visible_to_workers(self) -> Iterator[None]:
        """Workers that are started inside find the servers by variables."""
        if self.endpoints:
            write_environment(self.endpoints, self._token)
        try:
            yield
        finally:
            for name in (SERVERS, TOKEN):
                os.environ.pop(name, None)

    def failure(self) -> ServerFailure | None:
        """The first server of this node that has ended by itself."""
        ended = [(index, server) for index, server in self._here.items() if not server.alive]
        if self._failure is None and ended:
            index, server = ended[0]
            detail = f"log: {self._log_of(index)}"
            self._failure = ServerFailure(index, socket.gethostname(), server.process, server.returncode, detail)
        return self._failure

    def close(self) -> None:
        """End those of this node. What has failed until now is known to `failure`."""
        if self._here:
            self.failure()
            with ThreadPoolExecutor(len(self._here)) as pool:
                list(pool.map(lambda server: server.close(), self._here.values()))
