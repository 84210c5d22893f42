"""What the launcher of one node is to run. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from colossus.launch.origin import Taken


@dataclass(frozen=True)
class NodeLaunch:
    """

    Attributes:
        begin: makes the run folder, and says from which checkpoint the run goes on. Called on the first node.
        local_ranks: of each node.
        endpoint: ``host:port`` where the nodes meet; needed when there are several.
        servers: parameter servers of the run.
        server_timeout_seconds: of silence after which a server gives up a worker.
    """

    config_path: str
    overrides: Sequence[str]
    begin: Callable[[], Taken]
    local_ranks: int
    nodes: int = 1
    endpoint: str | None = None
    servers: int = 0
    server_timeout_seconds: float = 60.0
