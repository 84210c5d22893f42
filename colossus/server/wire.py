"""Frames between workers and servers, and the greeting that comes before them. No torch.

Binary, lengths checked before memory is taken, nothing unpickled. A frame is a head of fixed size, a header of JSON,
and the bytes of arrays (which may lie in shared memory instead: `colossus.server.segments`).

Greeting: the server sends a challenge (random, so that a recorded greeting is worth nothing); the client answers with
who it is, a challenge of its own, and a proof that it knows the token (HMAC-SHA256 over both challenges); the server
proves the same. Nothing but the greeting is taken from who has not given the proof.
"""

from __future__ import annotations

import hmac
import json
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from colossus.comm.peer_wire import WireError

MAGIC = b"CLSV"
VERSION = 1
_CHALLENGE_BYTES = 32
_PROOF_BYTES = 32
INCARNATION_BYTES = 16

_CHALLENGE = struct.Struct(f"<4sH{_CHALLENGE_BYTES}s")
_HELLO = struct.Struct(f"<4sHiBB{INCARNATION_BYTES}s{_CHALLENGE_BYTES}s{_PROOF_BYTES}s")
_WELCOME = struct.Struct(f"<BBH{_PROOF_BYTES}s")  # status, whether segments are taken, bytes of words, proof
CHALLENGE_BYTES, HELLO_BYTES, WELCOME_BYTES = _CHALLENGE.size, _HELLO.size, _WELCOME.size
MOST_WORDS_BYTES = 1 << 12

#: statuses of a welcome: come in; the token is wrong; not now (another client of the number); never
WELCOME, STRANGER, BUSY, NEVER = range(4)

_HEAD = struct.Struct("<B3xIIQQ")  # kind, bytes of the header, segment, sequence, bytes of data
HEAD_BYTES = _HEAD.size
MOST_HEADER_BYTES = 1 << 20
_MOST_SEQUENCE = 1 << 63
#: data follow the header
NO_SEGMENT = 0xFFFFFFFF

# kinds of frames
REQUEST, REPLY, REFUSAL, ACKNOWLEDGE, RESUME, SEGMENT, FORGET, PING, BYE, FAILED = range(10)
_KINDS = 10


@dataclass(frozen=True)
class Hello:
    """Who connects.

    Attributes:
        is_new: whether it has never been connected before.
        takes_segments: whether shared memory can be handed to it.
        incarnation: random, one for each client.
    """

    worker: int
    is_new: bool
    takes_segments: bool
    incarnation: bytes
    challenge: bytes

    @classmethod
    def make(cls, worker: int, incarnation: bytes, *, is_new: bool, takes_segments: bool) -> Hello:
        return cls(worker, is_new, takes_segments, incarnation, secrets.token_bytes(_CHALLENGE_BYTES))

    def pack(self, token: bytes, challenge: bytes) -> bytes:
        """``challenge`` is the server's."""
        return self._pack(_proof(token, b"client", challenge, self._pack(b"")))

    def _pack(self, proof: bytes) -> bytes:
        return _HELLO.pack(
            MAGIC, VERSION, self.worker, self.is_new, self.takes_segments, self.incarnation, self.challenge, proof
        )

    @classmethod
    def unpack(cls, raw: bytes, token: bytes, challenge: bytes) -> Hello:
        """Raises `WireError` for a stranger."""
        magic, version, worker, is_new, takes_segments, incarnation, theirs, proof = _HELLO.unpack(raw)
        if magic != MAGIC or version != VERSION:
            raise WireError("it is no worker of this version of colossus")
        hello = cls(worker, bool(is_new), bool(takes_segments), incarnation, theirs)
        # over the bytes as they came: nothing in them is free to be changed
        if not hmac.compare_digest(
            proof, _proof(token, b"client", challenge, raw[:-_PROOF_BYTES] + bytes(_PROOF_BYTES))
        ):
            raise WireError("it does not know the token of this run")
        return hello


@dataclass(frozen=True)
class Welcome:
    """What the server answers to a `Hello`, before ``num_words`` bytes of text.

    Attributes:
        is_proven: whether who answers knows the token.
    """

    status: int
    takes_segments: bool
    num_words: int
    is_proven: bool

    @staticmethod
    def pack(status: int, takes_segments: bool, words: str, token: bytes, hello: Hello | None) -> bytes:
        """``hello``: None for a stranger, to whom nothing is proven."""
        text = words.encode()[:MOST_WORDS_BYTES]
        proof = bytes(_PROOF_BYTES)
        if hello is not None:
            said = bytes([status, takes_segments]) + text
            proof = _proof(token, b"server", hello.challenge, hello.incarnation + said)
        return _WELCOME.pack(status, takes_segments, len(text), proof) + text

    @staticmethod
    def unpack(raw: bytes, read: Callable[[int], bytes], token: bytes, hello: Hello) -> tuple[Welcome, str]:
        """``read(n)`` gives the next n bytes, the words. Raises `WireError` for what no server sends."""
        status, takes_segments, num_words, proof = _WELCOME.unpack(raw)
        if status > NEVER or num_words > MOST_WORDS_BYTES:
            raise WireError("it is no server of this version of colossus")
        text = read(num_words)
        wanted = _proof(token, b"server", hello.challenge, hello.incarnation + raw[:2] + text)
        proven = hmac.compare_digest(proof, wanted)
        return Welcome(status, bool(takes_segments), num_words, proven), text.decode(errors="replace")


def make_challenge() -> tuple[bytes, bytes]:
    """A new one, and what is sent of it."""
    challenge = secrets.token_bytes(_CHALLENGE_BYTES)
    return challenge, _CHALLENGE.pack(MAGIC, VERSION, challenge)


def read_challenge(raw: bytes) -> bytes:
    """Raises `WireError` for what no server sends."""
    magic, version, challenge = _CHALLENGE.unpack(raw)
    if magic != MAGIC or version != VERSION:
        raise WireError("what answers there is no server of this version of colossus")
    return bytes(challenge)


@dataclass(frozen=True)
class Head:
    """What a frame begins with.

    Attributes:
        header_bytes: that follow.
        segment: of shared memory in which the data lie; with `NO_SEGMENT` they follow the header.
        sequence: of the request that it is about, 0 where it is about none.
        data_bytes: of the arrays.
    """

    kind: int
    header_bytes: int
    segment: int
    sequence: int
    data_bytes: int

    @classmethod
    def unpack(cls, raw: bytes | bytearray | memoryview, most_data: int) -> Head:
        """Raises `WireError` for kinds that are not, and lengths beyond what is expected."""
        head = cls(*_HEAD.unpack(raw))
        if head.kind >= _KINDS:
            raise WireError(f"a frame of kind {head.kind}")
        if head.header_bytes > MOST_HEADER_BYTES or head.data_bytes > most_data:
            raise WireError(
                f"a frame of {head.header_bytes} + {head.data_bytes} bytes, where at most {MOST_HEADER_BYTES} + "
                f"{most_data} are expected"
            )
        if head.sequence >= _MOST_SEQUENCE:
            raise WireError(f"a frame of sequence {head.sequence}")
        return head

    @property
    def following_bytes(self) -> int:
        """Of data, after the header."""
        return self.data_bytes if self.segment == NO_SEGMENT else 0


def frame(
    kind: int, header: bytes = b"", *, sequence: int = 0, data_bytes: int = 0, segment: int = NO_SEGMENT
) -> bytes:
    """The beginning of a frame; its data must follow, unless they lie in a segment."""
    return _HEAD.pack(kind, len(header), segment, sequence, data_bytes) + header


def encode(header: object) -> bytes:
    """The header of a frame.

    Raises:
        ValueError: it is no data of JSON, or has more than `MOST_HEADER_BYTES`.
    """
    try:
        text = json.dumps(header, separators=(",", ":")).encode()
    except (TypeError, RecursionError) as error:
        raise ValueError(f"a header must be data of JSON: {error}") from error
    if len(text) > MOST_HEADER_BYTES:
        raise ValueError(
            f"a header of {len(text)} bytes as JSON, where at most {MOST_HEADER_BYTES} can be sent: what is large goes "
            "into the arrays"
        )
    return text


def read_header(raw: bytes | bytearray) -> Any:
    """The header of a frame. Raises `WireError` where it is no JSON."""
    if not raw:
        return None
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a header that is no JSON ({type(error).__name__})") from error


def _proof(token: bytes, who: bytes, challenge: bytes, said: bytes) -> bytes:
    return hmac.digest(token, b"colossus %s:" % who + challenge + said, "sha256")
