"""Listening for streams and dialing them; both ends prove to each other that they know the key of the run.

The proof is an HMAC-SHA256 over the challenges of both ends, which are new for each stream, and over what the dialer
says of itself. So a recorded greeting cannot be replayed. The frames that follow are neither authenticated nor
encrypted: an attacker who can change traffic on the network can change them.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
import struct
from collections.abc import Callable

from colossus.comm.channel import read_exactly
from colossus.comm.net import Stream, WireError, running_loop

Address = tuple[str, int]

_log = logging.getLogger("colossus.comm")

#: the time that a dialer has to prove that it knows the key
GREETING_SECONDS = 10.0
#: the pause after the system could not accept a connection (too many files are open, say)
_PAUSE_SECONDS = 1.0

#: the size of a challenge and of a proof
_PROOF_BYTES = 32
_ABOUT = struct.Struct("<H")


class Listener:
    """A socket that accepts streams from dialers that know the key, from its construction until `close`.

    A dialer must prove within `GREETING_SECONDS` that it knows the key.

    Args:
        host: the address to listen at.
        key: the secret of those that may connect.
        on_stream: called by the thread of the loop with each new stream, which it is to `Stream.start`.
        name: the name of the listening service in the log.

    Attributes:
        address: the (host, port) to dial.
    """

    def __init__(self, host: str, key: bytes, on_stream: Callable[[Stream], object], name: str) -> None:
        self._key, self._on_stream, self._name = key, on_stream, name
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._sock = socket.create_server((host, 0), family=family, backlog=1024)
        self._sock.setblocking(False)
        self.address: Address = self._sock.getsockname()[:2]
        #: connections whose greeting is not complete
        self._greetings: set[asyncio.Task[None]] = set()
        running_loop().sockets.add(self._sock)

        async def begin() -> asyncio.Task[None]:
            return asyncio.create_task(self._accept())

        self._task = running_loop().run(begin()).result()

    def close(self) -> None:
        """Stop listening; streams stay open."""

        async def end() -> None:
            self._task.cancel()
            for task in tuple(self._greetings):
                task.cancel()
            asyncio.get_running_loop().call_soon(self._sock.close)  # the loop must not watch it any more by then

        running_loop().run(end()).result()

    async def _accept(self) -> None:
        while True:
            try:
                sock, _ = await asyncio.get_running_loop().sock_accept(self._sock)
            except OSError as error:
                _log.warning("%s could not accept a connection and tries again: %s", self._name, error)
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            running_loop().sockets.add(sock)
            task = asyncio.create_task(self._admit(sock))
            self._greetings.add(task)
            task.add_done_callback(self._greetings.discard)

    async def _admit(self, sock: socket.socket) -> None:
        try:
            async with asyncio.timeout(GREETING_SECONDS):
                sock.setblocking(False)
                about = await _greet(sock, self._key)
            self._on_stream(Stream(sock, about))
        except WireError as error:
            sock.close()
            _log.warning("something connected to %s and was dropped: %s", self._name, error)
        except (OSError, EOFError, asyncio.CancelledError):  # it is silent or gone, as a port scanner is
            sock.close()


async def _greet(sock: socket.socket, key: bytes) -> bytes:
    """Exchange proofs with a dialer, and return what it says of itself."""
    loop = asyncio.get_running_loop()

    async def receive(size: int) -> bytes:
        data = b""
        while len(data) < size:
            received = await loop.sock_recv(sock, size - len(data))
            if not received:
                raise EOFError
            data += received
        return data

    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    mine = secrets.token_bytes(_PROOF_BYTES)
    await loop.sock_sendall(sock, mine)
    theirs = await receive(_PROOF_BYTES)
    (size,) = _ABOUT.unpack(await receive(_ABOUT.size))
    proof, about = await receive(_PROOF_BYTES), await receive(size)
    if not hmac.compare_digest(proof, _proof(key, b"dials", mine, theirs, about)):
        raise WireError("it does not know the key of this run")
    await loop.sock_sendall(sock, _proof(key, b"listens", mine, theirs, about))
    return about


def dial(address: Address, key: bytes, about: bytes = b"", seconds: float = 10.0) -> Stream:
    """Connect to a `Listener`; any thread but the loop's may call this.

    Args:
        address: the listener's (host, port).
        key: the secret of the run.
        about: what this end says of itself, at most 64 KiB.
        seconds: the longest silence of the listener.

    Raises:
        WireError: the process that answers does not know the key.
        OSError: the listener cannot be reached, or does not answer in time (`TimeoutError`).
    """
    sock = socket.create_connection(address, seconds)
    running_loop().sockets.add(sock)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        mine, theirs = secrets.token_bytes(_PROOF_BYTES), read_exactly(sock, _PROOF_BYTES)
        sock.sendall(mine + _ABOUT.pack(len(about)) + _proof(key, b"dials", theirs, mine, about) + about)
        answer = read_exactly(sock, _PROOF_BYTES)
        if not hmac.compare_digest(answer, _proof(key, b"listens", theirs, mine, about)):
            raise WireError("what answers there does not know the key of this run")
        sock.setblocking(False)
        return Stream(sock, about)
    except ConnectionResetError as error:
        sock.close()
        raise WireError(f"what answers at {address[0]}:{address[1]} does not take the key of this process") from error
    except BaseException:
        sock.close()
        raise


def _proof(key: bytes, role: bytes, of_listener: bytes, of_dialer: bytes, about: bytes) -> bytes:
    return hmac.digest(key, b"colossus %s:" % role + of_listener + of_dialer + about, "sha256")
