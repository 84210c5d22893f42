"""A safetensors file, written as a stream and read in boxes.

The library writes from a copy of everything that goes into a file, and reads slices through a copy; here a file is
written from where tensors lie, and rows of a chunk are read into where they belong. `safetensors.safe_open` reads what
this writes. The format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from colossus.checkpoint.checksum import BLOCK_BYTES
from colossus.checkpoint.dtypes import CODES
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.manifest import Chunk
from colossus.layout.layout import Box

#: after which a file is flushed while it is written: one flush at its end would be silent for as long as it takes, and
#: a run that was told to stop is ended when it is silent for too long
FLUSH_BYTES = 1 << 30
#: what lies between two parts of rows and is as long is not read; what is shorter is read, and dropped
_LONG_GAP_BYTES = 1 << 15

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in CODES}


def dtype_name(dtype: torch.dtype) -> str:
    """As the manifest has it.

    Raises:
        CheckpointError: for a dtype that a checkpoint cannot hold.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise CheckpointError(f"a tensor of dtype {name} cannot be saved; dtypes are {', '.join(sorted(DTYPES))}")
    return name


@dataclass(frozen=True)
class Header:
    """Of a safetensors file.

    Attributes:
        data: the file's first bytes.
        offsets: key -> of its first byte in the file.
        num_bytes: of the whole file.
    """

    data: bytes
    offsets: dict[str, int]
    num_bytes: int


def make_header(tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> Header:
    """Of a file with these (key, dtype, shape), which lie in it in this order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for key, dtype, shape in tensors:
        start, end = end, end + dtype.itemsize * torch.Size(shape).numel()
        stored = [*shape, 2] if dtype.is_complex else list(shape)  # real and imaginary parts
        entries[key] = {"dtype": CODES[dtype_name(dtype)], "shape": stored, "data_offsets": [start, end]}
        offsets[key] = start
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    moved = {key: first + offset for key, offset in offsets.items()}
    return Header(len(text).to_bytes(8, "little") + text, moved, first + end)


def write_file(
    path: Path, header: Header, tensors: Iterable[Tensor], on_block: Callable[[], None] = lambda: None
) -> int:
    """Write and flush a file whose header was made of these tensors, one after the other.

    A tensor that is not on the host, or not contiguous, is copied first, one at a time.

    Args:
        on_block: called after each `BLOCK_BYTES`.

    Returns:
        The CRC-32 of the file.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    flushed = 0

    def after_block() -> None:
        nonlocal flushed
        written = os.lseek(descriptor, 0, os.SEEK_CUR)
        if written - flushed >= FLUSH_BYTES:
            flushed = written
            os.fsync(descriptor)
        on_block()

    try:
        crc = _write(descriptor, memoryview(header.data), 0, after_block)
        for tensor in tensors:
            crc = _write(descriptor, host_bytes(tensor), crc, after_block)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return crc


def _write(descriptor: int, data: memoryview, crc: int, on_block: Callable[[], None]) -> int:
    for start in range(0, len(data), BLOCK_BYTES):
        block = data[start : start + BLOCK_BYTES]
        crc = zlib.crc32(block, crc)
        while block:
            block = block[os.write(descriptor, block) :]
        on_block()
    return crc


def host_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor; of a contiguous one on the host its memory."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return _memory(tensor) if tensor.numel() else memoryview(b"")


def _memory(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor of the host."""
    # one element is contiguous whatever its strides, but is no view of bytes with them
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


class BoxReader:
    """Reads boxes of chunks; its memory beside the targets is `BLOCK_BYTES`."""

    def __init__(self) -> None:
        self._scratch = torch.empty(BLOCK_BYTES, dtype=torch.uint8)

    def read(self, descriptor: int, chunk: Chunk, dtype: torch.dtype, box: Box, out: Tensor) -> None:
        """Read what a chunk has of a box of its tensor into that place of ``out``, which has the shape of the box.

        Contiguous memory of the host with the chunk's dtype is read into directly, any other in blocks.
        """
        overlap = [
            (max(start, low), min(start + size, high))
            for start, size, (low, high) in zip(chunk.start, chunk.size, box, strict=True)
        ]
        if any(low >= high for low, high in overlap):
            return
        target = out
        for dim, ((low, high), (first, _)) in enumerate(zip(overlap, box, strict=True)):
            target = target.narrow(dim, low - first, high - low)
        inside = [(low - start, high - start) for (low, high), start in zip(overlap, chunk.start, strict=True)]
        self._read_region(descriptor, chunk.offset, chunk.size, inside, dtype, target)

    def _read_region(
        self,
        descriptor: int,
        offset: int,
        size: Sequence[int],
        inside: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        target: Tensor,
    ) -> None:
        """Read a region of a row-major array of this size at an offset of a file."""
        if all(span == (0, whole) for span, whole in zip(inside[1:], size[1:], strict=True)):
            row = dtype.itemsize * math.prod(size[1:])
            self._read_rows(descriptor, offset + (inside[0][0] * row if inside else 0), dtype, target)
            return
        row = dtype.itemsize * math.prod(size[1:])
        part = dtype.itemsize * math.prod(high - low for low, high in inside[1:])
        first, last = inside[0]
        if row - part >= _LONG_GAP_BYTES or row > BLOCK_BYTES:
            for index in range(first, last):
                start = offset + index * row
                self._read_region(descriptor, start, size[1:], inside[1:], dtype, target[index - first])
            return
        block = BLOCK_BYTES // row
        for start in range(first, last, block):
            stop = min(start + block, last)
            rows = self._scratch[: (stop - start) * row].view(dtype).view(stop - start, *size[1:])
            read_exactly(descriptor, offset + start * row, _memory(rows))
            for dim, (low, high) in enumerate(inside[1:], 1):
                rows = rows.narrow(dim, low, high - low)
            target[start - first : stop - first].copy_(rows)

    def _read_rows(self, descriptor: int, offset: int, dtype: torch.dtype, target: Tensor) -> None:
        """Fill a tensor from consecutive bytes."""
        num_bytes = target.numel() * dtype.itemsize
        is_plain = not (target.is_conj() or target.is_neg())  # its memory is its values
        if target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous() and is_plain:
            read_exactly(descriptor, offset, _memory(target))
        elif num_bytes <= BLOCK_BYTES:
            whole = self._scratch[:num_bytes].view(dtype).view(target.shape)
            read_exactly(descriptor, offset, _memory(whole))
            target.copy_(whole)
        else:
            row = num_bytes // target.shape[0]
            block = max(1, BLOCK_BYTES // row)
            for start in range(0, target.shape[0], block):
                part = target[start : start + block] if row <= BLOCK_BYTES else target[start]
                self._read_rows(descriptor, offset + start * row, dtype, part)


def read_exactly(descriptor: int, offset: int, buffer: memoryview) -> None:
    while len(buffer):
        count = os.preadv(descriptor, [buffer[: 1 << 30]], offset)
        if not count:
            raise CheckpointError("the file ends early: it was truncated while it was read")
        offset, buffer = offset + count, buffer[count:]
