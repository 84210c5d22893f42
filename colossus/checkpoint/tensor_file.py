"""A safetensors file, written as a stream and read in boxes.

The library copies all tensors of a file before it writes them and computes no checksum. A save would need the memory of
a rank's part twice, and a second reading for its checksum. It reads through a memory map, whose pages count as memory
of the process, and a failing disk would end the process; `BoxReader` needs one block, and raises an error in words.
`safetensors.safe_open` reads these files. The format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from colossus.checkpoint.durable import BLOCK_BYTES, naming
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.manifest import SAFETENSORS_DTYPES, Chunk
from colossus.comm import host_staging
from colossus.layout.layout import Box

#: bytes after which a file is flushed while it is written. One flush at its end would take long, and a stopping run
#: that is silent for long is killed.
FLUSH_BYTES = 1 << 30
#: bytes of each of two buffers between files and a device
STAGED_BYTES = 1 << 24
#: unwanted bytes of a row are skipped if they are as many; fewer are read and dropped
_LONG_GAP_BYTES = 1 << 15

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in SAFETENSORS_DTYPES}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in the manifest."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise CheckpointError(f"a tensor of dtype {name} cannot be saved; dtypes are {', '.join(sorted(DTYPES))}")
    return name


class Header(NamedTuple):
    """The header of a safetensors file.

    Attributes:
        data: first bytes of the file.
        offsets: key -> offset of its first byte in the file.
        num_bytes: bytes of the whole file.
    """

    data: bytes
    offsets: dict[str, int]
    num_bytes: int


def make_header(tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> Header:
    """Return the header of a file with these (key, dtype, shape), in this order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for key, dtype, shape in tensors:
        start, end = end, end + dtype.itemsize * math.prod(shape)
        stored = [*shape, 2] if dtype.is_complex else list(shape)  # real and imaginary parts
        entries[key] = {"dtype": SAFETENSORS_DTYPES[dtype_name(dtype)], "shape": stored, "data_offsets": [start, end]}
        offsets[key] = start
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    moved = {key: first + offset for key, offset in offsets.items()}
    return Header(len(text).to_bytes(8, "little") + text, moved, first + end)


def write_file(
    path: Path, header: Header, tensors: Iterable[Tensor], on_block: Callable[[], None] = lambda: None
) -> int:
    """Write and flush a file whose header was made from these tensors, one after the other.

    A tensor that is not on the host, or not contiguous, is copied first, one at a time.

    Args:
        path: path of a new file.
        header: header of the file.
        tensors: the tensors.
        on_block: called after each `BLOCK_BYTES`.

    Returns:
        The CRC-32 of the file.
    """
    crc = written = flushed = 0

    def write(data: memoryview) -> None:
        nonlocal crc, written, flushed
        for start in range(0, len(data), BLOCK_BYTES):
            block = data[start : start + BLOCK_BYTES]
            crc, written = zlib.crc32(block, crc), written + len(block)
            while block:
                block = block[os.write(descriptor, block) :]
            if written - flushed >= FLUSH_BYTES:
                flushed = written
                os.fsync(descriptor)
            on_block()

    with naming(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            write(memoryview(header.data))
            for tensor in tensors:
                write(host_bytes(tensor))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return crc


def host_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor: its own memory if it is contiguous on the host, else a copy."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return _memory(tensor) if tensor.numel() else memoryview(b"")


def _memory(tensor: Tensor) -> memoryview:
    # one element is contiguous whatever its strides, but is no view of bytes with them
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


#: reads a file from an offset into the beginning of a buffer; returns the number of bytes, 0 at the end of the file
ReadAt = Callable[[int, memoryview], int]


def read_at(descriptor: int) -> ReadAt:
    """Return a function that reads an open file of this host."""
    return lambda offset, buffer: os.preadv(descriptor, [buffer[: 1 << 30]], offset)


class _DeviceStaging:
    """Two page-locked buffers in turn: one is filled from a file while the other is copied to a device."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._copied: list[Any] = [None, None]

    def next_buffer(self, device: torch.device) -> Tensor:
        """Return the buffer that was copied before the last one, [`STAGED_BYTES`] uint8, once its copy is over."""
        if not self._buffers:
            self._buffers = [host_staging.empty((STAGED_BYTES,), torch.uint8, device) for _ in range(2)]
        self._buffers.reverse()
        self._copied.reverse()
        if self._copied[0] is not None:
            self._copied[0].synchronize()
        return self._buffers[0]

    def send(self, part: Tensor, target: Tensor) -> None:
        """Start to copy a part of the last buffer to a tensor, which may have any strides and another dtype."""
        target.copy_(part.to(target.device, non_blocking=True))
        if is_on_device(target):
            module: Any = torch.get_device_module(target.device)
            self._copied[0] = module.current_stream(target.device).record_event()


def is_on_device(target: Tensor) -> bool:
    """Return whether files are read to a tensor through page-locked buffers."""
    return target.device.type not in ("cpu", "meta")


class BoxReader:
    """A reader of boxes of chunks. Beside the targets it needs `BLOCK_BYTES` of memory, for devices `STAGED_BYTES` too.

    A device gets one copy of many rows at once, while the next rows are read; the host does not wait for the last.
    """

    def __init__(self) -> None:
        self._block = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
        self._staging = _DeviceStaging()

    def read(self, file: ReadAt, chunk: Chunk, dtype: torch.dtype, box: Box, out: Tensor) -> None:
        """Read the part of a box that a chunk has into its place in ``out``, which has the shape of the box."""
        inside: list[tuple[int, int]] = []
        for dim, (start, size, (low, high)) in enumerate(zip(chunk.start, chunk.size, box, strict=True)):
            first, last = max(start, low), min(start + size, high)
            if first >= last:
                return
            out = out.narrow(dim, first - low, last - first)
            inside.append((first - start, last - start))
        read = self._read_staged if is_on_device(out) else self._read
        if not inside:  # a scalar, as one row
            read(file, chunk.offset, (1,), [(0, 1)], dtype, out.view(1))
        else:
            read(file, chunk.offset, chunk.size, inside, dtype, out)

    def _read_staged(
        self,
        file: ReadAt,
        offset: int,
        size: Sequence[int],
        inside: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        target: Tensor,
    ) -> None:
        """Do as `_read`, through the page-locked buffers."""
        (first, last), *inner = inside
        wanted = dtype.itemsize * math.prod(high - low for low, high in inner)
        if wanted > STAGED_BYTES:
            row = dtype.itemsize * math.prod(size[1:])
            for index in range(first, last):
                self._read_staged(file, offset + index * row, size[1:], inner, dtype, target[index - first])
            return
        for start in range(first, last, STAGED_BYTES // wanted):
            stop = min(start + STAGED_BYTES // wanted, last)
            part = target[start - first : stop - first]
            buffer = self._staging.next_buffer(target.device)
            staged = buffer[: part.numel() * dtype.itemsize].view(dtype).view(part.shape)
            self._read(file, offset, size, [(start, stop), *inner], dtype, staged)
            self._staging.send(staged, part)

    def _read(
        self,
        file: ReadAt,
        offset: int,
        size: Sequence[int],
        inside: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        target: Tensor,
    ) -> None:
        """Read the ranges ``inside`` of a row-major array of this size, which begins at this offset of a file."""
        first, last = inside[0]
        row = dtype.itemsize * math.prod(size[1:])
        wanted = dtype.itemsize * math.prod(high - low for low, high in inside[1:])
        is_lazy = target.is_conj() or target.is_neg()  # its memory is not its values
        is_plain = target.device.type == "cpu" and target.is_contiguous() and target.dtype == dtype and not is_lazy
        if wanted == row and is_plain:
            _read_exactly(file, offset + first * row, _memory(target))
            return
        if row > BLOCK_BYTES or row - wanted >= _LONG_GAP_BYTES:
            for index in range(first, last):
                self._read(file, offset + index * row, size[1:], inside[1:], dtype, target[index - first])
            return
        rows_of_block = BLOCK_BYTES // row
        for start in range(first, last, rows_of_block):
            stop = min(start + rows_of_block, last)
            num_bytes = (stop - start) * row
            _read_exactly(file, offset + start * row, _memory(self._block[:num_bytes]))
            rows = self._block[:num_bytes].view(dtype).view(stop - start, *size[1:])
            part = rows[(slice(None), *(slice(*span) for span in inside[1:]))]
            target[start - first : stop - first].copy_(part)


def _read_exactly(file: ReadAt, offset: int, buffer: memoryview) -> None:
    while buffer:
        count = file(offset, buffer)
        if not count:
            raise CheckpointError("the file ends early: it was truncated while it was read")
        offset, buffer = offset + count, buffer[count:]
