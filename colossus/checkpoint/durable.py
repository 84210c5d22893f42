"""Files that outlive a crash of the machine, folders that exist whole or not at all, and checksums. No torch.

A file system may keep writes and renames in memory for half a minute, and write them in another order. So data is
flushed before it gets its name, and a name before another one points to it or goes away.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from colossus.checkpoint.errors import CheckpointError

#: bytes that are written, read and summed at a time
BLOCK_BYTES = 1 << 20
#: errors of file systems that cannot flush a folder (some network and FUSE ones), and need not
_CANNOT_FLUSH = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.ENOTTY}


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add this path to errors of the file system in the block: those of write and fsync name none."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


def write_flushed(path: Path, data: bytes) -> None:
    """Write a file, or overwrite it, and flush it."""
    with naming(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            block = memoryview(data)
            while block:
                block = block[os.write(descriptor, block) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def flush(path: Path) -> None:
    """Flush the names in a folder, or a file that others have written, to the disk, where the file system can."""
    with naming(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _CANNOT_FLUSH:
                raise
        finally:
            os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, and flush their names. Several processes may do so at once."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for parent in reversed(missing):
        parent.mkdir(exist_ok=True)
        with contextlib.suppress(PermissionError):  # one may write into a folder that one may not read
            flush(parent.parent)


def remove(folder: Path) -> None:
    """Remove a folder, if it exists. It is renamed first, so that no half of it is ever read as a whole."""
    if os.path.lexists(folder):
        dying = folder.with_name(f"step-00000000.deleted-{folder.name}-{uuid.uuid4().hex[:8]}")
        folder.rename(dying)
        flush(dying.parent)
        shutil.rmtree(dying, ignore_errors=True)


def require_new(target: Path) -> None:
    """Raise `CheckpointError` if something exists at this path."""
    if os.path.lexists(target):
        raise CheckpointError(f"{target}: exists already; name a new folder, or move it away")


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Make a folder beside ``target``, for the block to write into.

    It is renamed to ``target`` when the block ends well, and removed otherwise.
    """
    require_new(target)
    temporary = target.with_name(f".{target.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        make_folder(temporary)
        yield temporary
        flush(temporary)
        require_new(target)
        temporary.rename(target)
        flush(target.parent)
    except OSError as error:
        raise CheckpointError(f"{error.filename or target}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def problem_of(path: Path, crc32: int, on_block: Callable[[], None] = lambda: None) -> str | None:
    """Return what is wrong with a file that was written with this CRC-32; None if nothing is.

    Args:
        path: path of the file.
        crc32: its checksum when it was written.
        on_block: called after each `BLOCK_BYTES`.
    """
    crc, buffer = 0, memoryview(bytearray(BLOCK_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                crc = zlib.crc32(buffer[:count], crc)
                on_block()
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror or error}"
    return None if crc == crc32 else f"{path.name} is corrupted: its CRC-32 is {crc:08x}, not {crc32:08x}"
