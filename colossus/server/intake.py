"""Requests out of the frames of a worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from colossus.comm.buffer_pool import BufferPool
from colossus.comm.peer_wire import WireError
from colossus.server import wire
from colossus.server.arrays import unpack
from colossus.server.connection import Connection
from colossus.server.frame_parser import Frame
from colossus.server.messages import Request
from colossus.server.outgoing import Outgoing
from colossus.server.segments import SegmentPool
from colossus.server.session import Session
from colossus.server.wire import Head

_POOLED_BYTES = 1 << 30
_NOTHING = torch.empty(0, dtype=torch.uint8)


class Intake:
    """Checks what has come, and makes requests of it.

    Args:
        most_bytes: of the arrays of one request.
        hand_over: is given each request, once.
    """

    def __init__(self, most_bytes: int, hand_over: Callable[[Request], object]) -> None:
        self._most_bytes, self._hand_over = most_bytes, hand_over
        self._buffers = BufferPool(_POOLED_BYTES)

    def allocate(self, head: Head, header: Any) -> tuple[list[memoryview], Any]:
        """For `FrameParser`."""
        if head.kind != wire.REQUEST or not isinstance(header, dict):
            raise WireError("data that belong to no request")
        packing = unpack(header.get("a"), self._most_bytes)
        buffer = self._buffers.take(head.data_bytes)
        return [memoryview(buffer.numpy())], (packing, buffer)  # type: ignore[arg-type]

    def take(self, session: Session, connection: Connection, frame: Frame) -> bool:
        """What has come; False when the worker has said goodbye.

        Raises:
            WireError: no worker sends this.
            OSError: a segment could not be mapped; the worker comes again and sends it through the socket.
        """
        match frame.head.kind:
            case wire.REQUEST:
                self._take_request(session, frame)
            case wire.ACKNOWLEDGE:
                session.acknowledge(frame.header)
            case wire.RESUME:
                session.resume(frame.header)
            case wire.PING:
                pass
            case wire.SEGMENT:
                try:
                    session.mapped.add(frame.header, connection.take_descriptor())
                except OSError:
                    session.can_map = False
                    raise
            case wire.FORGET:
                session.mapped.forget(frame.header)
            case wire.BYE:
                return False
            case kind:
                raise WireError(f"a frame of kind {kind}, which is a server's")
        return True

    def _take_request(self, session: Session, frame: Frame) -> None:
        header, sequence = frame.header, frame.head.sequence
        if not isinstance(header, dict) or type(header.get("o")) is not str or type(header.get("h")) is not dict:
            raise WireError("a request without an operation")
        buffer: Tensor | None = None
        if frame.context is not None:
            packing, buffer = frame.context
            memory = buffer
        else:
            packing = unpack(header.get("a", []), self._most_bytes)
            memory = session.mapped.memory(frame.head.segment, packing.num_bytes) if packing.num_bytes else _NOTHING
        if packing.num_bytes != frame.head.data_bytes:
            raise WireError("arrays of another length than their description")
        if not session.take(sequence):
            if buffer is not None:
                self._buffers.give_back(buffer)
            return

        def answer(header: dict[str, Any] | None, arrays: Sequence[Tensor], error: str | None) -> None:
            self._answer(session, sequence, buffer, header, arrays, error)

        self._hand_over(Request(session.worker, header["o"], header["h"], packing.views(memory), answer))

    def _answer(
        self,
        session: Session,
        sequence: int,
        buffer: Tensor | None,
        header: dict[str, Any] | None,
        arrays: Sequence[Tensor],
        error: str | None,
    ) -> None:
        def make(segments: SegmentPool | None) -> Outgoing:
            if error is not None:
                return Outgoing(wire.REFUSAL, {"e": error}, (), None, self._buffers)
            return Outgoing(wire.REPLY, {"h": header}, arrays, segments, self._buffers)

        session.answer(sequence, make)
        if buffer is not None:
            self._buffers.give_back(buffer)
