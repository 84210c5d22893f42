"""Checksums of the files of a checkpoint. No torch."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path

from colossus.checkpoint.manifest import FileEntry

#: what is written, read and summed at a time
BLOCK_BYTES = 1 << 20


def checksum(path: Path, on_block: Callable[[], None] = lambda: None) -> int:
    """The CRC-32 of a file; ``on_block`` is called after each `BLOCK_BYTES`."""
    crc, buffer = 0, memoryview(bytearray(BLOCK_BYTES))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        while count := os.readv(descriptor, [buffer]):
            crc = zlib.crc32(buffer[:count], crc)
            on_block()
    finally:
        os.close(descriptor)
    return crc


def problem_of(path: Path, wanted: FileEntry, on_block: Callable[[], None] = lambda: None) -> str | None:
    """What is wrong with the contents of a file of a checkpoint: ``rank-00000.safetensors is corrupted: ..``, or
    None."""
    try:
        found = checksum(path, on_block)
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror or error}"
    if found == wanted.crc32:
        return None
    return f"{path.name} is corrupted: its CRC-32 is {found:08x}, it was written with {wanted.crc32:08x}"
