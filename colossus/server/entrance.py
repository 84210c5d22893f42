"""Where a server listens, and who comes in: the greeting is `colossus.server.wire`'s."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable

from colossus.comm.door import Door
from colossus.comm.local_streams import is_stranger
from colossus.comm.peer_wire import WireError
from colossus.server.wire import HELLO_BYTES, STRANGER, Hello, Welcome, make_challenge

_log = logging.getLogger("colossus.server")
_BACKLOG = 1024
#: connections that have not said who they are
_MOST_UNKNOWN = 256

#: takes over the stream of who has proven to know the token
Admit = Callable[[socket.socket, Hello], object]


class Entrance:
    """Listens from the beginning, on TCP and on a UNIX socket; lets in after `open`.

    Args:
        selector: whose keys' data are functions to be called.
        host: address to listen at.
        admit: takes over the stream of who has proven to know the token.
        name: of the server, for the log.

    Attributes:
        port: of TCP.
        unix: the UNIX socket: its path, or ``@`` and its abstract name; None where there is none.
    """

    def __init__(self, selector: selectors.BaseSelector, host: str, token: bytes, admit: Admit, name: str) -> None:
        self.selector, self.token, self.admit, self.name = selector, token, admit, name
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self.port: int = listener.getsockname()[1]
        self.unix: str | None = None
        self._folder: str | None = None
        self._listeners, self._doors = [listener], [self._door(listener)]
        with contextlib.suppress(OSError):
            listener = self._listen_locally()
            self._listeners.append(listener)
            self._doors.append(self._door(listener))

    def _door(self, listener: socket.socket) -> Door:
        listener.setblocking(False)
        door = Door(self.selector, listener, _MOST_UNKNOWN, lambda stream: _Guest(self, door, stream), self.name)
        return door

    def _listen_locally(self) -> socket.socket:
        if _has_abstract_sockets():  # nothing is left of them
            self.unix = f"@colossus-server-{os.getpid()}-{secrets.token_hex(8)}"
        else:
            self._folder = tempfile.mkdtemp(prefix="colossus-server-")  # for this user alone
            self.unix = f"{self._folder}/socket"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(unix_address(self.unix))
            listener.listen(_BACKLOG)
        except OSError:
            self.unix = None
            listener.close()
            raise
        return listener

    def open(self) -> None:
        for door in self._doors:
            door.open()

    def look_around(self) -> None:
        """To be called again and again."""
        for door in self._doors:
            door.look_around()

    def close(self) -> None:
        """Listen no more."""
        for listener in self._listeners:
            listener.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def close_in_child(self) -> None:
        """After a fork."""
        for listener in self._listeners:
            listener.close()


class _Guest:
    """A connection that has not said who it is."""

    def __init__(self, entrance: Entrance, door: Door, stream: socket.socket) -> None:
        self._entrance, self._door, self._stream, self.since = entrance, door, stream, time.monotonic()
        self._raw = b""
        entrance.selector.register(stream, selectors.EVENT_READ, self.read)
        self._challenge, told = make_challenge()
        with contextlib.suppress(OSError):  # its end is seen when it is read
            stream.send(told)

    def read(self) -> None:
        try:
            received = self._stream.recv(HELLO_BYTES - len(self._raw))  # what follows is not the greeting's
            if not received:
                self._leave()
                return
            self._raw += received
            if len(self._raw) < HELLO_BYTES:
                return
            if _is_local(self._stream) and sys.platform == "linux" and is_stranger(self._stream):
                raise WireError("it is another user's")
            hello = Hello.unpack(self._raw, self._entrance.token, self._challenge)
        except BlockingIOError:
            return
        except OSError:
            self._leave()
            return
        except WireError as error:
            _log.warning("something connected to %s and was dropped: %s", self._entrance.name, error)
            with contextlib.suppress(OSError):
                self._stream.send(Welcome.pack(STRANGER, False, "", self._entrance.token, None))
            self._leave()
            return
        self._entrance.selector.unregister(self._stream)
        self._door.forget(self)
        self._entrance.admit(self._stream, hello)

    def turn_away(self) -> None:
        self._leave()

    def _leave(self) -> None:
        self._entrance.selector.unregister(self._stream)
        self._stream.close()
        self._door.forget(self)


def unix_address(name: str) -> str:
    """Of an `Entrance.unix`, as the system wants it."""
    return "\0" + name[1:] if name.startswith("@") else name


def _is_local(stream: socket.socket) -> bool:
    return stream.family == socket.AF_UNIX


def _has_abstract_sockets() -> bool:
    return sys.platform == "linux"
