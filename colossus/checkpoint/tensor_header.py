"""The header of a safetensors file, read and checked. No torch, and no code of the file is run.

The format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colossus.checkpoint.dtypes import CODES, ITEM_BYTES
from colossus.checkpoint.errors import CheckpointError, DamagedCheckpoint

#: of a header; the library has the same bound
_MOST_BYTES = 100_000_000
#: what safetensors calls a dtype -> torch's name; complex numbers are read as their real and imaginary parts
_NAMES = {code: name for name, code in CODES.items() if not name.startswith("complex")}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file, row-major.

    Attributes:
        dtype: by torch's name.
        offset: of its first byte in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name, all of whose bytes are there and belong to one tensor each.

    Raises:
        DamagedCheckpoint: it is truncated, or no safetensors file.
        CheckpointError: it cannot be read, or has a dtype that is not known here.
    """
    try:
        if not path.is_file():
            raise DamagedCheckpoint(f"{path}: {'is no file' if path.exists() else 'is missing'}")
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(8)
            length = int.from_bytes(first, "little")
            if len(first) < 8 or length > _MOST_BYTES or file.read(1) != b"{":
                raise DamagedCheckpoint(f"{path}: is no safetensors file: it does not begin with a header")
            if 8 + length > size:
                raise DamagedCheckpoint(f"{path}: is truncated: it has {size} bytes, its header alone {8 + length}")
            file.seek(8)
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        tensors = _parse(text, 8 + length)
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path}: its header cannot be understood ({type(error).__name__}: {error})") from None
    _check_spans(path, tensors, 8 + length, size)
    return tensors


def _parse(text: bytes, first: int) -> dict[str, StoredTensor]:
    body = json.loads(text, object_pairs_hook=_without_doubles)
    if not isinstance(body, dict):
        raise TypeError("no object")
    tensors = {}
    for name, entry in body.items():
        if name == "__metadata__":
            continue
        code, shape, (start, stop) = entry["dtype"], tuple(map(_count, entry["shape"])), entry["data_offsets"]
        if code not in _NAMES:
            raise CheckpointError(f"{name} has dtype {code!r:.40}; those known are {', '.join(sorted(_NAMES))}")
        wanted = math.prod(shape) * ITEM_BYTES[_NAMES[code]]
        if _count(stop) - _count(start) != wanted:
            raise DamagedCheckpoint(f"{name}: {code} {list(shape)} has {wanted} bytes, not those of {start} to {stop}")
        tensors[name] = StoredTensor(_NAMES[code], shape, first + start)
    return tensors


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice")
    return found


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r:.40} where a count is expected")
    return value


def _check_spans(path: Path, tensors: dict[str, StoredTensor], first: int, size: int) -> None:
    """That the tensors lie one behind the other and fill the file."""
    end = first
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, math.prod(item[1].shape))):
        if tensor.offset != end:
            raise DamagedCheckpoint(f"{path}: {name} begins at byte {tensor.offset}, what lies before it ends at {end}")
        end += math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
    if end != size:
        verb = "truncated" if size < end else "too long"
        raise DamagedCheckpoint(f"{path}: is {verb}: it has {size} bytes, its header says {end}")
