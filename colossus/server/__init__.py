"""Parameter servers: requests and replies between workers and servers, what a server keeps, and tensors at servers in a
training loop of one's own."""

from typing import TYPE_CHECKING

from colossus._lazy import lazy_names

if TYPE_CHECKING:
    from colossus.server.joined import close
    from colossus.server.user_api import ParameterServer, free, init, prefetch, receive, send

__all__ = ["ParameterServer", "close", "free", "init", "prefetch", "receive", "send"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "ParameterServer": "user_api",
        "close": "joined",
        "free": "user_api",
        "init": "user_api",
        "prefetch": "user_api",
        "receive": "user_api",
        "send": "user_api",
    },
)
