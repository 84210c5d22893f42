"""Ids that were made once, kept for all processes of a machine."""

from __future__ import annotations

import contextlib
import os
import uuid
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Ids = np.ndarray[Any, Any]


def kept_ids(key: str, make: Callable[[], Ids]) -> Ids:
    """What ``make`` gives, [ids] uint16 or uint32; memory-mapped where it has been made for this key before.

    Kept in ``$XDG_CACHE_HOME/colossus/tokens`` (``~/.cache``), with their CRC-32 behind them; a file that is not as it
    was written is made again.
    """
    kept = _folder() / f"{key}.npy"
    if (found := _read(kept)) is not None:
        return found
    ids = make()
    with contextlib.suppress(OSError):  # a folder that cannot be written to, or is full: the ids are in memory
        kept.parent.mkdir(parents=True, exist_ok=True)
        temporary = kept.with_name(f".{uuid.uuid4().hex}.npy")
        try:
            with temporary.open("wb") as file:
                np.save(file, ids, allow_pickle=False)
                file.write(_checksum(ids))
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(kept)
        finally:
            temporary.unlink(missing_ok=True)
        found = _read(kept)
        return ids if found is None else found
    return ids


def _read(file: Path) -> Ids | None:
    """The ids of a file, memory-mapped; None where there is none, or it is not as it was written."""
    try:
        ids = np.load(file, mmap_mode="r", allow_pickle=False)
        if not isinstance(ids, np.memmap) or ids.ndim != 1 or ids.dtype not in (np.uint16, np.uint32):
            return None
        with file.open("rb") as opened:
            opened.seek(ids.offset + ids.nbytes)
            return ids if opened.read() == _checksum(ids) else None
    except Exception:  # numpy raises many: EOFError, ValueError, tokenize.TokenError, ..
        return None


def _checksum(ids: Ids) -> bytes:
    return zlib.crc32(np.ascontiguousarray(ids).data).to_bytes(4, "little")


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "colossus" / "tokens"
