"""Messages between processes that know a common key: a head in JSON, and tensors; frames of `colossus.comm.net`.

The links between replicas (`comm.peers`) and the calls at servers (`colossus.server`) are such messages. The payload of
a frame is the tensors in a `FlatBuffer`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colossus.comm.flat_buffer import FlatBuffer, Form, flat_bytes
from colossus.comm.host_staging import BufferPool
from colossus.comm.net import Stream, WireError


def copy(target: Tensor, source: Tensor) -> None:
    """Copy a tensor into another of the same shape.

    Contiguous tensors are copied without torch's threads; other threads of this process run meanwhile.
    """
    target, source = target.detach(), source.detach()
    if target.is_contiguous() and source.is_contiguous() and target.dtype == source.dtype and not source.is_conj():
        if target.numel():
            np.copyto(flat_bytes(target).numpy(), flat_bytes(source).numpy())
    else:
        target.copy_(source)


def head_of(head: dict[str, Any], arrays: Sequence[Tensor]) -> bytes:
    """Return the head of the frame of a message."""
    described = [[str(array.dtype).removeprefix("torch."), list(array.shape)] for array in arrays]
    return json.dumps(head | {"a": described}, separators=(",", ":")).encode()


def send(stream: Stream, head: dict[str, Any], arrays: Sequence[Tensor], buffers: BufferPool) -> int:
    """Send a message and return the bytes of its arrays. They are on the host, and copied before this returns."""
    flat, raw = FlatBuffer.of(arrays), head_of(head, arrays)
    if not flat.nbytes:
        stream.send(raw)
        return 0
    buffer = buffers.take(flat.nbytes)
    for view, tensor in zip(flat.views(buffer), arrays, strict=True):
        copy(view, tensor)
    stream.send(raw, [memoryview(buffer.numpy())], lambda: buffers.give_back(buffer))  # type: ignore[arg-type]
    return flat.nbytes


class Messages:
    """A receiver of messages at either end: see `colossus.comm.net.Receiver`.

    Args:
        buffers: pool of buffers for the payload.
        take: called with each message: its head, its arrays, and the buffer that they lie in, None if it is ``into``'s.
        end: see `Receiver.on_end`.
        into_of: returns the reader's tensors that a message is written to, None for a new buffer.
        max_bytes: the most bytes of a message's arrays; one that claims more ends its stream.
    """

    def __init__(
        self,
        buffers: BufferPool,
        take: Callable[[dict[str, Any], list[Tensor], Tensor | None], object],
        end: Callable[[str | None], object],
        into_of: Callable[[dict[str, Any]], Sequence[Tensor] | None] = lambda head: None,
        max_bytes: float = math.inf,
    ) -> None:
        self._buffers, self._take, self._end, self._into_of = buffers, take, end, into_of
        self._max_bytes = max_bytes
        #: the message whose payload comes: its head, its arrays, and the buffer that they lie in
        self._coming: tuple[dict[str, Any], list[Tensor], Tensor | None] | None = None

    def allocate(self, head: bytes, size: int) -> Sequence[memoryview]:
        described = json.loads(head)
        forms, into = _forms(described), self._into_of(described)
        flat = FlatBuffer(forms)
        if flat.nbytes != size:
            raise WireError(f"a payload of {size} bytes, where the tensors of its head take {flat.nbytes}")
        if flat.tensor_bytes > self._max_bytes:
            raise WireError(f"a message of {flat.tensor_bytes} bytes, where at most {self._max_bytes} are expected")
        if into is not None and (wanted := [(tensor.dtype, tensor.shape) for tensor in into]) != forms:
            raise WireError(f"tensors of {_in_words(forms)}, where the reader has {_in_words(wanted)} for them")
        if into is not None and all(tensor.is_contiguous() for tensor in into):
            self._coming = described, list(into), None
            return flat.memory_of(into)
        buffer = self._buffers.take(size)
        self._coming = described, flat.views(buffer), buffer
        return [memoryview(buffer.numpy())]  # type: ignore[arg-type]

    def on_frame(self, head: bytes) -> None:
        message, self._coming = self._coming, None
        if message is None:  # it has no payload
            described = json.loads(head)
            message = described, FlatBuffer(_forms(described)).views(torch.empty(0, dtype=torch.uint8)), None
        self._take(*message)

    def on_end(self, reason: str | None) -> None:
        self._end(reason)


def _forms(head: Mapping[str, Any]) -> list[Form]:
    """Return dtype and shape of each tensor of a message with this head."""
    return [(getattr(torch, name), torch.Size(shape)) for name, shape in head["a"]]


def _in_words(forms: Sequence[Form]) -> str:
    return ", ".join(f"{dtype} {list(shape)}" for dtype, shape in forms) or "no form"
