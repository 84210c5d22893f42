"""Where the arrays of a reply go: into the caller's tensors, or new ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from colossus.comm.peer_wire import WireError
from colossus.server import wire
from colossus.server.arrays import Packing, copy, unpack
from colossus.server.frame_parser import Frame
from colossus.server.segments import SegmentMap
from colossus.server.wire import Head

_NOTHING = torch.empty(0, dtype=torch.uint8)

Into = Sequence[Tensor] | None


class ReplyArrays:
    """
    Args:
        most_bytes: of one reply.
        into_of: the caller's tensors for a sequence; None where it wants new ones, or where nobody waits.
    """

    def __init__(self, most_bytes: int, mapped: SegmentMap, into_of: Callable[[int], Into]) -> None:
        self._most_bytes, self._mapped, self._into_of = most_bytes, mapped, into_of

    def allocate(self, head: Head, header: Any) -> tuple[list[memoryview], Any]:
        """For `FrameParser`: data are read to where they belong, if they fit there."""
        if head.kind != wire.REPLY or not isinstance(header, dict):
            raise WireError("data that belong to no reply")
        packing = unpack(header.get("a"), self._most_bytes)
        into = self._into_of(head.sequence)
        if into is not None and _fits(packing, into):
            pieces = packing.targets(into)
            if pieces is not None:
                return pieces, (packing, None)
        buffer = torch.empty(head.data_bytes, dtype=torch.uint8)
        return [memoryview(buffer.numpy())], (packing, buffer)  # type: ignore[arg-type]

    def of(self, frame: Frame, into: Into) -> list[Tensor]:
        """The arrays of a reply.

        Raises:
            ValueError: they are not as ``into`` wants them.
            WireError: no server sends this.
        """
        if frame.context is not None:
            packing, memory = frame.context
            if memory is None:
                return list(into or ())
        else:
            packing = unpack(frame.header.get("a", []), self._most_bytes)
            size = packing.num_bytes
            memory = self._mapped.memory(frame.head.segment, size) if size else _NOTHING
        if packing.num_bytes != frame.head.data_bytes:
            raise WireError("arrays of another length than their description")
        views = packing.views(memory)
        if into is None:
            if frame.context is not None:
                return views
            shapes = zip(packing.dtypes, packing.shapes, strict=True)
            into = [torch.empty(shape, dtype=dtype) for dtype, shape in shapes]
        elif not _fits(packing, into):
            wanted = [[str(one.dtype).removeprefix("torch."), list(one.shape)] for one in into]
            raise ValueError(f"the reply has arrays {packing.describe()}, where into has {wanted}")
        for target, view in zip(into, views, strict=True):
            copy(target, view)
        return list(into)


def _fits(packing: Packing, into: Sequence[Tensor]) -> bool:
    wanted = [(one.dtype, tuple(one.shape)) for one in into]
    return wanted == list(zip(packing.dtypes, packing.shapes, strict=True))
