"""The error of a rank that waits in vain for another one, also where torch has raised it. No torch."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from opcode import opname

#: the words of an error of this process's own limit, which torch's errors of connections contain, too
OPEN_FILES_ERROR = os.strerror(errno.EMFILE)

#: words in errors of gloo, which are plain `RuntimeError`s: the source file, or those of a collective that ends because
#: another one on the same connection has timed out
_GLOO_SAYS = ("gloo/transport", "Application timeout caused pair closure")
#: torch's errors of a connection, and of a store in which a rank waits for the key of another
_CONNECTION_ERRORS = {"torch.distributed.DistNetworkError", "torch.distributed.DistStoreError"}
#: torch's error of NCCL, which may also be this rank's own, and the words of those that come from other ranks
_NCCL_ERROR = "torch.distributed.DistBackendError"
_NCCL_SAYS = (
    "NCCL communicator was aborted",
    "ncclRemoteError",
    "ncclSystemError",
    "remote process exited or there was a network error",
    "Watchdog caught collective operation timeout",
    "Some NCCL operations have failed or timed out",
)


class PeerGone(RuntimeError):
    """Another process has died or is silent, so this rank cannot go on. The cause lies with the other process.

    Attributes:
        index: the other rank's index in the group, or None where that is unknown.
    """

    def __init__(self, message: str, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


def is_of_a_peer(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, comes from another rank that has gone or is silent.

    torch has no type for that: gloo raises a plain RuntimeError, whatever is wrong, and NCCL has one type for its own
    errors and for those of others. This is the one place where such texts are read, and only texts of errors that come
    out of C++: what a ``raise`` in Python makes, a user's for example, is of the type that it names.
    """
    return any(isinstance(_typed(cause), PeerGone) for cause in causes(error))


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def _typed(error: BaseException) -> BaseException:
    """Return the `PeerGone` that an error of torch stands for, or the error itself."""
    if not isinstance(error, RuntimeError) or isinstance(error, PeerGone):
        return error
    text, names = str(error), {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
    is_of_peer = bool(names & _CONNECTION_ERRORS)
    if not is_of_peer and (type(error) is RuntimeError or _NCCL_ERROR in names) and _is_of_native_code(error):
        is_of_peer = any(words in text for words in (_NCCL_SAYS if _NCCL_ERROR in names else _GLOO_SAYS))
    return PeerGone(text) if is_of_peer and OPEN_FILES_ERROR not in text else error


def _is_of_native_code(error: BaseException) -> bool:
    """Return whether an error was raised by a function that the innermost frame has called, not by the frame itself."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] != "RAISE_VARARGS"
