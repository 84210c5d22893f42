"""Parameter servers: requests and replies between workers and servers, what a server keeps, and tensors at servers in a
training loop of one's own.
"""

from typing import TYPE_CHECKING

from colossus._lazy import lazy_names

if TYPE_CHECKING:
    from colossus.server.user_api import ParameterServer, close, free, init, prefetch, receive, send

__all__ = ["ParameterServer", "close", "free", "init", "prefetch", "receive", "send"]

__getattr__, __dir__ = lazy_names(__name__, dict.fromkeys(__all__, "user_api"))
