"""The parameter servers of a run: each node's launcher starts its own, and all learn where all are."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colossus.launch.nodes import Nodes
from colossus.launch.server_failure import ServerFailure, last_lines, log_of
from colossus.launch.server_plan import servers_of_nodes
from colossus.server import environment
from colossus.server.process import ServerProcess, ServerSettings


@dataclass
class Servers:
    """Of one launcher.

    Attributes:
        endpoints: of all servers of the run, by index.
        here: those of this node, which this launcher has started.
    """

    endpoints: Sequence[Mapping[str, Any]] = ()
    here: dict[int, ServerProcess] = field(default_factory=dict)
    _token: bytes = b""
    _failure: ServerFailure | None = None

    def start(self, number: int, folder: Path, timeout_seconds: float, store: Any, nodes: Nodes | None) -> None:
        """Start those of this node, and learn where the others are. All nodes at once.

        Args:
            number: of the servers of the run.
            folder: the run folder.
            timeout_seconds: of silence after which a server gives up a worker.
            store: in which the nodes have met.

        Raises:
            RuntimeError: when a server could not be started, on all nodes.
        """
        node, num_nodes = (0, 1) if nodes is None else (nodes.node, nodes.num_nodes)
        self._token = environment.new_token() if nodes is None else _shared_token(store, node)
        mine = servers_of_nodes(number, num_nodes)[node]
        self._folder = folder
        host = "127.0.0.1" if nodes is None else nodes.address
        problem = ""
        try:
            self._start(mine, host, timeout_seconds)
        except (OSError, RuntimeError) as error:
            problem = f"a server could not be started on host {host}: {error}"
        told: dict[str, Any] = {
            "endpoints": {index: server.endpoint for index, server in self.here.items()},
            "problem": problem,
        }
        every = [told] if nodes is None else _exchange(store, node, num_nodes, told)
        problems = [each["problem"] for each in every if each["problem"]]
        if problems:
            raise RuntimeError("; ".join(problems))
        endpoints = {int(index): endpoint for each in every for index, endpoint in each["endpoints"].items()}
        self.endpoints = [endpoints[index] for index in range(number)]

    def _start(self, indices: Sequence[int], host: str, timeout_seconds: float) -> None:
        for index in indices:  # all at once, and from the main thread, which lives as long as they
            log = log_of(self._folder, index)
            log.parent.mkdir(parents=True, exist_ok=True)
            settings = ServerSettings(host=host, timeout_seconds=timeout_seconds, log=str(log))
            self.here[index] = ServerProcess(index, self._token, settings)
        for server in self.here.values():
            server.wait_until_ready()

    def tell_workers(self) -> None:
        """Set the variables by which workers that are started from here on find the servers."""
        if self.endpoints:
            environment.write(self.endpoints, self._token)

    @staticmethod
    def forget() -> None:
        """Take them back."""
        for name in (environment.SERVERS, environment.TOKEN):
            os.environ.pop(name, None)

    def failure(self) -> ServerFailure | None:
        """The first server of this node that has ended by itself."""
        if self._failure is None:
            ended = [(index, server) for index, server in self.here.items() if not server.alive]
            for index, server in ended[:1]:
                log, endpoint = log_of(self._folder, index), server.endpoint
                self._failure = ServerFailure(
                    index,
                    socket.gethostname(),
                    endpoint["process"],
                    server.returncode,
                    server.failure or last_lines(log),
                    str(log),
                )
        return self._failure

    def close(self) -> None:
        """End those of this node. What has failed until now is known to `failure`."""
        if not self.here:
            return
        self.failure()
        with ThreadPoolExecutor(len(self.here)) as pool:
            list(pool.map(lambda server: server.close(), self.here.values()))


def _shared_token(store: Any, node: int) -> bytes:
    """The first node makes it."""
    key = "colossus/servers/token"
    if node == 0:
        store.set(key, environment.new_token().hex())
    return bytes.fromhex(store.get(key).decode())


def _exchange(store: Any, node: int, num_nodes: int, told: Mapping[str, Any]) -> list[dict[str, Any]]:
    store.set(f"colossus/servers/{node}", json.dumps(told))
    return [json.loads(text) for text in store.multi_get([f"colossus/servers/{each}" for each in range(num_nodes)])]
