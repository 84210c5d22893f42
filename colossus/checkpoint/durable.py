"""Files that outlive a crash of the machine, folders that are there as a whole or not at all, checksums. No torch.

A file system may keep what is written and renamed in memory for half a minute, and write it in another order. So
data is flushed before it gets its name, a name before another one is made to point to it or another one goes away.
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

#: what is written, read and summed at a time
BLOCK_BYTES = 1 << 20
#: what a file system answers that cannot flush a folder (some network and FUSE ones), and need not
_CANNOT_FLUSH = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.ENOTTY}


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of the file system name this path: those of write and fsync do not by themselves."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


def write_flushed(path: Path, data: bytes) -> None:
    """Write a file, or write over it, and flush it."""
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
    """Flush the names in a folder to the disk, or a file that others have written, where the file system knows how."""
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
    """Make a folder and those that it lies in, and flush their names. Several processes may do so at once."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        with contextlib.suppress(PermissionError):  # one may write into a folder that one may not read
            flush(each.parent)


def remove(folder: Path) -> None:
    """Remove a folder, if it is there: it loses its name first, so that no half of it is ever taken for a whole."""
    if os.path.lexists(folder):
        dying = folder.with_name(f"step-00000000.deleted-{folder.name}-{uuid.uuid4().hex[:8]}")
        folder.rename(dying)
        flush(dying.parent)
        shutil.rmtree(dying, ignore_errors=True)


def require_new(target: Path) -> None:
    """That nothing is there yet, else a `CheckpointError`."""
    if os.path.lexists(target):
        raise CheckpointError(f"{target}: is there already; name a folder that is not, or move it away")


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to write into, beside ``target``, whose name it gets when the block ends well; else it is removed."""
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
    """What is wrong with a file that was written with this CRC-32, in words; None if nothing is.

    Args:
        on_block: called after each `BLOCK_BYTES`.
    """
    found, buffer = 0, memoryview(bytearray(BLOCK_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                found = zlib.crc32(buffer[:count], found)
                on_block()
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror or error}"
    return None if found == crc32 else f"{path.name} is corrupted: its CRC-32 is {found:08x}, not {crc32:08x}"
