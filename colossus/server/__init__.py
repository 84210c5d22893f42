"""Parameter servers: calls of workers, the store of a server, and tensors at servers for a user's own training loop."""

from typing import TYPE_CHECKING

from colossus._lazy import lazy_names

if TYPE_CHECKING:
    from colossus.server.user_api import ParameterServer, close, free, init, prefetch, receive, send

__all__ = ["ParameterServer", "close", "free", "init", "prefetch", "receive", "send"]

__getattr__, __dir__ = lazy_names(__name__, dict.fromkeys(__all__, "user_api"))
