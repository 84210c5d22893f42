"""Ways in which a checkpoint is not what it was, by hand of a disk or of a person."""

from __future__ import annotations

import json
import os
import pickle
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
#: of a checkpoint of two ranks
FILES = ("rank-00000.safetensors", "rank-00001.safetensors")


@dataclass(frozen=True)
class Damage:
    """What is done to a checkpoint's folder, and a pattern of what is said of it."""

    name: str
    do: Callable[[Path], Any]
    said: str
    #: of those whose files have the right sizes only a checksum tells
    needs_reading: bool = False

    def __str__(self) -> str:
        return self.name


def rewritten(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """The manifest with a change, and the right checksum: as a program would write it."""

    def do(folder: Path) -> None:
        body = json.loads((folder / MANIFEST).read_bytes())["manifest"]
        with_checksum(folder, json.dumps(change(body) or body).encode())

    return do


def with_checksum(folder: Path, text: bytes) -> None:
    (folder / MANIFEST).write_bytes(b'{"crc32": "%08x", "manifest": ' % zlib.crc32(text) + text + b"}\n")


def flip(path: Path, offset: int, mask: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= mask
    path.write_bytes(data)


def truncate(path: Path, num_bytes: int) -> None:
    os.truncate(path, path.stat().st_size - num_bytes)


def _swap(folder: Path) -> None:
    first, second = (folder / name for name in FILES)
    first.rename(folder / "other")
    second.rename(first)
    (folder / "other").rename(second)


class _Runs:
    def __reduce__(self) -> Any:
        return os.mkdir, ("unpickled",)


#: makes a folder ``unpickled`` where it is loaded
PICKLE = pickle.dumps(_Runs())


def _pickle_of_this_size(path: Path) -> None:
    path.write_bytes(PICKLE.ljust(path.stat().st_size, b"\0"))


def _matrix(change: Callable[[list[Any]], Any]) -> Callable[[Path], None]:
    """Change the entry of the matrix: dtype, shape, chunks of (number of the file, offset, start, size)."""
    return rewritten(lambda body: change(body["tensors"]["model/matrix"]) and None)


def _name(name: str) -> Callable[[Path], None]:
    return rewritten(lambda body: body["files"][0].__setitem__(0, name))


DAMAGES = [
    Damage("no manifest", lambda at: (at / MANIFEST).unlink(), r"no manifest.json"),
    Damage("manifest cut", lambda at: truncate(at / MANIFEST, 500), r"manifest.json: is truncated or corrupted"),
    Damage("manifest foreign", lambda at: (at / MANIFEST).write_text('{"weights": []}'), r"or not one of colossus"),
    Damage("JSON without an end", lambda at: with_checksum(at, b"[" * 10**5), r"manifest.json: cannot be understood"),
    Damage("another format", rewritten(lambda body: {**body, "format": "x"}), r"format 'x' is not colossus"),
    Damage("a file above", _name("../step-00000001/rank-00000.safetensors"), r"file '.*' is no plain file name"),
    Damage("the manifest as a file", _name(MANIFEST), r"file 'manifest.json' is no plain file name"),
    Damage("a hole", _matrix(lambda entry: entry[2].pop()), r"matrix \(4, 3\) is not covered once by its 1 "),
    Damage("an overlap", _matrix(lambda entry: entry[2].append(entry[2][0])), r"is not covered once by its 3 chunks"),
    Damage("both", _matrix(lambda entry: entry[2][1].__setitem__(2, [0, 0])), r"is not covered once by its 2 chunks"),
    Damage("data cut", lambda at: truncate(at / FILES[0], 1), r"rank-00000.safetensors: is truncated or changed: it"),
    Damage("data flipped", lambda at: flip(at / FILES[1], -1, 128), r"rank-00001.safetensors is corrupted", True),
    Damage("data swapped", _swap, r"rank-0000.\.safetensors:? is (truncated|corrupted)"),
    Damage("data missing", lambda at: (at / FILES[1]).unlink(), r"rank-00001.safetensors is missing"),
    Damage("data a pickle", lambda at: _pickle_of_this_size(at / FILES[0]), r"rank-00000.safetensors is corrup", True),
]  # fmt: skip
