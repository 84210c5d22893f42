"""Standard output and standard error of a run, which continues when writing to them fails."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any

from colossus import machine


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Let no write to standard output or standard error raise inside the block.

    The reader of a pipe may end before the run (``| head``, a ``tee`` that Ctrl-C has killed), a disk may be full, or a
    stream may have been closed from the start (``>&-``). Training must not end because of its own messages.
    """
    streams = {"stdout": sys.stdout, "stderr": sys.stderr}
    try:
        for name, stream in streams.items():
            setattr(sys, name, _lasting(stream))
        yield
    finally:
        for name, stream in streams.items():
            setattr(sys, name, stream)


class _LastingFile(io.FileIO):
    """A file that writes to the null device once its reader is gone; after a full disk each write tries anew."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in machine.DISK_IS_FULL:
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self.fileno())
                os.close(null)
            return len(data)


def _lasting(stream: Any) -> Any:
    """Return a stream to the same descriptor whose writes do not raise; a stream without a descriptor as it is."""
    if stream is None:  # it was closed before the process began
        return open(os.devnull, "w")
    try:
        stream.flush()
        file = _LastingFile(stream.fileno(), "w", closefd=False)
    except (OSError, ValueError, AttributeError):
        return stream
    # unbuffered, as Python's own under -u, so that a print of a process that is killed later is not lost
    return io.TextIOWrapper(file, stream.encoding, "backslashreplace", write_through=True)
