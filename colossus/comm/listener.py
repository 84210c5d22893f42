"""How streams are made: who listens, who connects, and how each proves to the other that it knows the key of the run.

The proof is HMAC-SHA256 over both their challenges, which are new for each stream, and over what the dialer says of
itself, so a recorded greeting is of no use. Frames after it are neither authenticated nor encrypted: who can change
what the network carries can change them.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
import struct
from collections.abc import Callable

from colossus.comm.net import Stream, WireError, running_loop

Address = tuple[str, int]

_log = logging.getLogger("colossus.comm")

#: within which who connects must have proven to know the key
GREETING_SECONDS = 10.0
#: until the system is asked again for a connection that it could not make: too many files are open, say
_PAUSE_SECONDS = 1.0

_CHALLENGE = struct.Struct("<4s32s")
_MAGIC = b"CLS2"
_ABOUT = struct.Struct("<H")
_PROOF_BYTES = 32


class Listener:
    """Listens from the beginning.

    Whoever connects must prove within `GREETING_SECONDS` to know the key.

    Args:
        host: address to listen at.
        key: known to those that may connect alone.
        on_stream: called by the thread of the loop with each stream that is greeted: takes it, by `Stream.start`.
        name: of what listens, for the log.

    Attributes:
        address: at which it listens.
    """

    def __init__(self, host: str, key: bytes, on_stream: Callable[[Stream], object], name: str) -> None:
        self._key, self._on_stream, self._name = key, on_stream, name
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._sock = socket.create_server((host, 0), family=family, backlog=1024)
        self._sock.setblocking(False)
        self.address: Address = self._sock.getsockname()[:2]
        #: connections that have not said who they are
        self._unknown: set[asyncio.Task[None]] = set()
        running_loop().sockets.add(self._sock)

        async def begin() -> asyncio.Task[None]:
            return asyncio.create_task(self._accept())

        self._task = running_loop().run(begin()).result()

    def close(self) -> None:
        """Listen no more; streams stay."""

        async def end() -> None:
            self._task.cancel()
            for task in tuple(self._unknown):
                task.cancel()
            asyncio.get_running_loop().call_soon(self._sock.close)  # once the loop watches it no more

        running_loop().run(end()).result()

    async def _accept(self) -> None:
        while True:
            try:
                sock, _ = await asyncio.get_running_loop().sock_accept(self._sock)
            except OSError as error:
                _log.warning("%s cannot make a connection and tries it again: %s", self._name, error)
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            running_loop().sockets.add(sock)
            task = asyncio.create_task(self._let_in(sock))
            self._unknown.add(task)
            task.add_done_callback(self._unknown.discard)

    async def _let_in(self, sock: socket.socket) -> None:
        why = ""
        try:
            async with asyncio.timeout(GREETING_SECONDS):
                sock.setblocking(False)
                about = await _greet_dialer(sock, self._key)
            self._on_stream(Stream(sock, about))
            return
        except WireError as error:
            why = str(error)
        except (TimeoutError, asyncio.CancelledError):
            why = "it did not say who it is"
        except (OSError, EOFError):  # it has gone again, as who looks for open ports does
            pass
        sock.close()
        if why:
            _log.warning("something connected to %s and was dropped: %s", self._name, why)


def dial(address: Address, key: bytes, about: bytes = b"", seconds: float = 10.0) -> Stream:
    """Connect to a `Listener`. From any thread but the loop's.

    Args:
        about: what the other end is told of this one, at most 64 KiB.
        seconds: in which it must have answered.

    Raises:
        WireError: what answers does not know the key.
        OSError: it cannot be reached, or does not answer in time (`TimeoutError`).
    """

    async def connect() -> Stream:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        running_loop().sockets.add(sock)
        try:
            sock.setblocking(False)
            async with asyncio.timeout(seconds):
                await asyncio.get_running_loop().sock_connect(sock, address)
                await _greet_listener(sock, key, about)
            return Stream(sock, about)
        except TimeoutError:
            sock.close()
            raise TimeoutError(f"nothing has answered at {_shown(address)} within {seconds:g} s") from None
        except EOFError:
            sock.close()
            raise WireError(f"what answers at {_shown(address)} does not take the key of this process") from None
        except BaseException:
            sock.close()
            raise

    return running_loop().run(connect()).result()


def _shown(address: Address) -> str:
    host, port = address
    return f"{f'[{host}]' if ':' in host else host}:{port}"


# -- the greeting ---------------------------------------------------------------------------------------------


async def _greet_dialer(sock: socket.socket, key: bytes) -> bytes:
    """At the end that listens: what the other says of itself."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    mine = secrets.token_bytes(32)
    await _send(sock, _CHALLENGE.pack(_MAGIC, mine))
    theirs = _read_challenge(await _receive(sock, _CHALLENGE.size))
    (size,) = _ABOUT.unpack(await _receive(sock, _ABOUT.size))
    proof = await _receive(sock, _PROOF_BYTES)
    about = await _receive(sock, size)
    if not hmac.compare_digest(proof, _proof(key, b"dials", mine, theirs, about)):
        raise WireError("it does not know the key of this run")
    await _send(sock, _proof(key, b"listens", mine, theirs, about))
    return about


async def _greet_listener(sock: socket.socket, key: bytes, about: bytes) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    mine = secrets.token_bytes(32)
    theirs = _read_challenge(await _receive(sock, _CHALLENGE.size))
    proof = _proof(key, b"dials", theirs, mine, about)
    await _send(sock, _CHALLENGE.pack(_MAGIC, mine) + _ABOUT.pack(len(about)) + proof + about)
    if not hmac.compare_digest(await _receive(sock, _PROOF_BYTES), _proof(key, b"listens", theirs, mine, about)):
        raise WireError("what answers there does not know the key of this run")


def _read_challenge(raw: bytes) -> bytes:
    magic, challenge = _CHALLENGE.unpack(raw)
    if magic != _MAGIC:
        raise WireError("it is no process of this version of colossus")
    return bytes(challenge)


def _proof(key: bytes, role: bytes, of_listener: bytes, of_dialer: bytes, about: bytes) -> bytes:
    return hmac.digest(key, b"colossus %s:" % role + of_listener + of_dialer + about, "sha256")


async def _send(sock: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, data)


async def _receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        received = await asyncio.get_running_loop().sock_recv(sock, size - len(data))
        if not received:
            raise EOFError
        data += received
    return data
