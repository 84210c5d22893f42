"""Parameters that live in server processes: which of the algorithms an option asks for."""

from __future__ import annotations

from typing import Any

from colossus.engine.strategies.downpour import Downpour
from colossus.engine.strategies.elastic import Elastic
from colossus.engine.strategies.options.server import ServerOptions
from colossus.engine.strategies.server_async import AsyncSGD
from colossus.engine.strategies.server_sync import SyncServer
from colossus.engine.strategies.strategy import Strategy


def make_server(**options: Any) -> Strategy:
    """``dict(type="server", ..)``; options as in `ServerOptions`."""
    checked = ServerOptions(**options)
    if checked.is_elastic:
        return Elastic(checked)
    if checked.algorithm == "downpour":
        return Downpour(checked)
    return SyncServer(checked) if checked.mode == "sync" else AsyncSGD(checked)
