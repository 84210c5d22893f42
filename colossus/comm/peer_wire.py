"""Frames between peers: who is at the other end of a connection, and messages of a header and two parts. No torch.

Binary, lengths checked, nothing unpickled. A connection carries messages in one direction and begins with a greeting
that proves knowledge of the run's key.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass

MAGIC = b"CLSP"
_HELLO = struct.Struct("<4sHH")
_PROOF_BYTES = 32
HELLO_BYTES = _HELLO.size + _PROOF_BYTES

_HEADER = struct.Struct("<HqHQ")  # kind, number, bytes of meta, bytes of data
HEADER_BYTES = _HEADER.size
MOST_META_BYTES = 1 << 12

#: the kind of the last message: its sender is through, and has not died
BYE = 0xFFFF


class WireError(ValueError):
    """Bytes that no peer of ours sends."""


@dataclass(frozen=True)
class Header:
    """What a message begins with.

    Attributes:
        kind: what it is for.
        number: of a step, or whatever sender and receiver count.
        meta_bytes, data_bytes: of the two parts that follow.
    """

    kind: int
    number: int
    meta_bytes: int
    data_bytes: int

    def pack(self) -> bytes:
        return _HEADER.pack(self.kind, self.number, self.meta_bytes, self.data_bytes)

    @classmethod
    def unpack(cls, raw: bytes, most_data: int) -> Header:
        """Raises `WireError` for lengths beyond what is expected."""
        header = cls(*_HEADER.unpack(raw))
        if header.meta_bytes > MOST_META_BYTES or header.data_bytes > most_data:
            raise WireError(
                f"a message of {header.meta_bytes} + {header.data_bytes} bytes, where at most {MOST_META_BYTES} + "
                f"{most_data} are expected"
            )
        return header


def hello(key: bytes, source: int, to: int) -> bytes:
    """The greeting of ``source`` to ``to``, indices in the group."""
    return _HELLO.pack(MAGIC, source, to) + _proof(key, source, to)


def read_hello(raw: bytes, key: bytes, to: int, num_ranks: int) -> int:
    """The index of who greets; `WireError` for a stranger."""
    magic, source, target = _HELLO.unpack(raw[: _HELLO.size])
    if magic != MAGIC or target != to or source >= num_ranks or source == to:
        raise WireError("it is no peer of this run")
    if not hmac.compare_digest(raw[_HELLO.size :], _proof(key, source, to)):
        raise WireError("it does not know the key of this run")
    return source


def _proof(key: bytes, source: int, to: int) -> bytes:
    return hmac.digest(key, b"peer %d to %d" % (source, to), "sha256")
