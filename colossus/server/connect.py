"""How a client reaches a server: the greeting from its side."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable
from typing import Any

from colossus import machine
from colossus.comm.channel import read_exactly
from colossus.comm.peer_wire import WireError
from colossus.server.entrance import unix_address
from colossus.server.messages import Refused, ServerGone
from colossus.server.wire import (
    BUSY,
    CHALLENGE_BYTES,
    NEVER,
    STRANGER,
    WELCOME_BYTES,
    Hello,
    Welcome,
    read_challenge,
)

_CONNECT_SECONDS = 5.0
#: how long it is tried where nothing listens any more, or another client of this number is connected
_REFUSED_SECONDS = 0.5
_BUSY_SECONDS = 2.0
#: seconds between one try and the next
_PAUSES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


class TurnedAway(Exception):
    """The server lives, and has said why not.

    Attributes:
        is_final: it makes no sense to try it again.
        is_ended: the server itself has ended, or has given this client up.
    """

    def __init__(self, words: str, *, is_final: bool, is_ended: bool = False) -> None:
        super().__init__(words)
        self.is_final, self.is_ended = is_final, is_ended


def address_of(endpoint: dict[str, Any]) -> str:
    """For messages."""
    host = endpoint["host"]
    return f"{f'[{host}]' if ':' in host else host}:{endpoint['port']} (process {endpoint['process']})"


def greet(endpoint: dict[str, Any], token: bytes, hello: Hello, seconds: float) -> tuple[socket.socket, bool]:
    """Connect, and be let in.

    Args:
        seconds: in which the server must answer.

    Returns:
        The stream, which does not block, and whether segments can be handed over it.

    Raises:
        TurnedAway: the server has said no.
        ConnectionRefusedError: nothing listens there.
        OSError, WireError: it cannot be reached, does not answer, or is no server of ours.
    """
    stream = _connect(endpoint, min(seconds, _CONNECT_SECONDS))
    try:
        deadline = time.monotonic() + seconds
        stream.settimeout(seconds)
        challenge = read_challenge(read_exactly(stream, CHALLENGE_BYTES))
        stream.sendall(hello.pack(token, challenge))

        def read(size: int) -> bytes:
            stream.settimeout(max(0.01, deadline - time.monotonic()))
            return bytes(read_exactly(stream, size))

        welcome, words = Welcome.unpack(read(WELCOME_BYTES), read, token, hello)
        if welcome.status == STRANGER:
            raise TurnedAway("it does not take the token of this process: it belongs to another run", is_final=True)
        if not welcome.is_proven:
            raise TurnedAway("what answers there does not know the token of this run", is_final=True)
        if welcome.status == BUSY:
            raise TurnedAway(words, is_final=False)
        if welcome.status == NEVER:
            raise TurnedAway(words, is_final=True, is_ended=True)
        stream.setblocking(False)
        return stream, welcome.takes_segments
    except BaseException:
        stream.close()
        raise


def connect(
    endpoint: dict[str, Any],
    token: bytes,
    hello: Hello,
    seconds: float,
    why: str,
    last_sign: float | None,
    is_given_up: Callable[[], bool],
) -> tuple[socket.socket, bool]:
    """As `greet`, again and again until it goes or there is no hope.

    Args:
        seconds: of silence after which there is none.
        why: the connection before was lost.
        last_sign: see `ServerGone`.
        is_given_up: whether nobody wants it any more.

    Raises:
        ServerGone, Refused
    """
    index, address, began = endpoint["index"], address_of(endpoint), time.monotonic()
    for number in itertools.count():
        waited = time.monotonic() - began
        try:
            return greet(endpoint, token, hello, max(0.5, seconds - waited))
        except TurnedAway as error:
            if error.is_ended:
                raise ServerGone(index, address, str(error), last_sign) from None
            if error.is_final or waited > _BUSY_SECONDS or not hello.is_new:
                raise Refused(f"server {index} at {address} refused worker {hello.worker}: {error}") from None
        except ConnectionRefusedError as error:
            if waited > _REFUSED_SECONDS:
                reason = "nothing listens there" + (f" any more ({why})" if why else "")
                raise ServerGone(index, address, reason, last_sign) from error
        except (OSError, WireError) as error:
            if waited > seconds - 1.0:
                reason = f"it could not be reached within {seconds:g} s ({error})"
                raise ServerGone(index, address, reason, last_sign) from error
        time.sleep(_PAUSES[min(number, len(_PAUSES) - 1)])
        if is_given_up():
            break
    raise ServerGone(index, address, f"the client was closed ({why})", last_sign)


def _connect(endpoint: dict[str, Any], seconds: float) -> socket.socket:
    if endpoint["unix"] is not None and endpoint["host_id"] == machine.host_id():
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            stream.settimeout(seconds)
            stream.connect(unix_address(endpoint["unix"]))
            return stream
        except (ConnectionRefusedError, FileNotFoundError):  # it has ended, or has another view of the files
            stream.close()
        except BaseException:
            stream.close()
            raise
    return socket.create_connection((endpoint["host"], endpoint["port"]), seconds)
