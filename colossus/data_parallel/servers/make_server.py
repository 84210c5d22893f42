"""Parameters that live in server processes: which of the algorithms an option asks for."""

from __future__ import annotations

from typing import Any

from colossus.data_parallel.options.server import ServerOptions
from colossus.data_parallel.servers.async_sgd import AsyncSGD
from colossus.data_parallel.servers.downpour import Downpour
from colossus.data_parallel.servers.elastic import Elastic
from colossus.data_parallel.servers.sync import SyncServer
from colossus.data_parallel.strategy import Strategy


def make_server(**options: Any) -> Strategy:
    """``dict(type="server", ..)``; options as in `ServerOptions`."""
    checked = ServerOptions(**options)
    if checked.is_elastic:
        return Elastic(checked)
    if checked.algorithm == "downpour":
        return Downpour(checked)
    return SyncServer(checked) if checked.mode == "sync" else AsyncSGD(checked)
