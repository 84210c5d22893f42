"""Messages out of the bytes of a connection, as they come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from colossus.comm.peer_wire import BYE, HEADER_BYTES, HELLO_BYTES, Header, read_hello


@dataclass(eq=False)
class Message:
    """What a peer has sent.

    Attributes:
        source: its index in the group.
        data: uint8 [bytes], on the host; give it back with `PeerLinks.release` when it is not needed any more.
    """

    source: int
    kind: int
    number: int
    meta: bytes
    data: Tensor


class FrameReader:
    """A connection in the midst of a greeting, a header, or one of the two parts of a message.

    Args:
        me: index of this rank among ``num_ranks``.
        key: known to them alone.
        most_bytes: of the data of one message.
        buffer: gives memory for it, uint8 [bytes].

    Attributes:
        source: index of who sends; None before it has said so.
        said_bye: nothing follows, and its end is no death.
    """

    def __init__(self, me: int, num_ranks: int, key: bytes, most_bytes: int, buffer: Callable[[int], Tensor]) -> None:
        self._me, self._num_ranks, self._key = me, num_ranks, key
        self._most_bytes, self._buffer = most_bytes, buffer
        self.source: int | None = None
        self.said_bye = False
        self._header: Header | None = None
        self._meta: bytes | None = None
        self._data: Tensor | None = None
        self._filled = 0
        self._expect(bytearray(HELLO_BYTES))

    @property
    def missing(self) -> memoryview:
        """Where the bytes that come next belong."""
        return self._into[self._filled :]

    def advance(self, size: int) -> Message | None:
        """``size`` bytes have been written to `missing`.

        Returns:
            The message that is complete with them.

        Raises:
            WireError: for bytes that no peer of ours sends.
        """
        self._filled += size
        if self._filled < len(self._into):
            return None
        if self.source is None:
            self.source = read_hello(bytes(self._into), self._key, self._me, self._num_ranks)
            self._expect(bytearray(HEADER_BYTES))
            return None
        if self._header is None:
            self._header = Header.unpack(bytes(self._into), self._most_bytes)
            self.said_bye = self._header.kind == BYE
            if self._header.meta_bytes:
                self._expect(bytearray(self._header.meta_bytes))
                return None
            return self._with_meta(self._header, b"")
        if self._meta is None:
            return self._with_meta(self._header, bytes(self._into))
        return self._complete(self._header)

    def _with_meta(self, header: Header, meta: bytes) -> Message | None:
        self._meta, self._data = meta, self._buffer(header.data_bytes)
        if not header.data_bytes:
            return self._complete(header)
        self._expect(self._data.numpy())
        return None

    def _complete(self, header: Header) -> Message | None:
        source, meta, data = self.source, self._meta, self._data
        assert source is not None
        assert meta is not None
        assert data is not None
        self._header = self._meta = self._data = None
        self._expect(bytearray(HEADER_BYTES))
        return None if self.said_bye else Message(source, header.kind, header.number, meta, data)

    def _expect(self, memory: object) -> None:
        self._into, self._filled = memoryview(memory), 0  # type: ignore[arg-type]
