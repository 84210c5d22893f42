"""Ways in which a checkpoint is not what it was, by hand of a disk or of a person."""

from __future__ import annotations

import json
import os
import pickle
import shutil
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


def _as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


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


_OUTSIDE = r"manifest.json: names a file .*, which is no plain file name"
_COVER = r"manifest.json: model/matrix of shape \(4, 3\) has 12 elements, its . chunks have .* cover it once"

DAMAGES = [
    Damage("no manifest", lambda at: (at / MANIFEST).unlink(), r"there is no manifest.json"),
    Damage("manifest empty", lambda at: (at / MANIFEST).write_bytes(b""), r"manifest.json: is truncated"),
    Damage("manifest of zeros", lambda at: (at / MANIFEST).write_bytes(bytes(4096)), r"manifest.json: is truncated"),
    Damage("manifest cut in its first line", lambda at: os.truncate(at / MANIFEST, 9), r"manifest.json: is truncated"),
    Damage("manifest cut", lambda at: truncate(at / MANIFEST, 500), r"manifest.json: is truncated or corrupted"),
    Damage("manifest cut by a byte", lambda at: truncate(at / MANIFEST, 1), r"manifest.json: is truncated or"),
    Damage("manifest flipped", lambda at: flip(at / MANIFEST, 300), r"manifest.json: is truncated or corrupted: its"),
    Damage("manifest foreign", lambda at: (at / MANIFEST).write_text('{"weights": []}'), r"manifest.json: is not one"),
    Damage("manifest of bytes", lambda at: (at / MANIFEST).write_bytes(b"\xff" * 99), r"manifest.json: is not one of"),
    Damage("manifest a folder", lambda at: _as_folder(at / MANIFEST), r"manifest.json: is no file"),
    Damage("manifest a pipe", lambda at: _as_pipe(at / MANIFEST), r"manifest.json: is no file"),
    Damage("no JSON", lambda at: with_checksum(at, b"{]"), r"manifest.json: is no JSON"),
    Damage("JSON without an end", lambda at: with_checksum(at, b"[" * 10**5), r"manifest.json: is no JSON"),
    Damage("a list", lambda at: with_checksum(at, b"[]"), r"manifest.json: is not the manifest"),
    Damage("another format", rewritten(lambda body: {**body, "format": "x"}), r"manifest.json: is not the manifest"),
    Damage("no tensors", rewritten(lambda body: body.pop("tensors") and None), r"cannot be understood \(KeyError"),
    Damage("a step of text", rewritten(lambda body: {**body, "step": "1"}), r"cannot be understood .*'1' where"),
    Damage("a negative size", _matrix(lambda entry: entry[1].__setitem__(0, -4)), r"cannot be understood .*-4 where"),
    Damage("half an element", _matrix(lambda entry: entry[1].__setitem__(0, 4.0)), r"cannot be understood .*4.0 where"),
    Damage("values a list", rewritten(lambda body: {**body, "values": []}), r"cannot be understood .*values is a list"),
    Damage("a file above", _name("../step-00000001/rank-00000.safetensors"), _OUTSIDE),
    Damage("a file of the system", _name("/etc/passwd"), _OUTSIDE),
    Damage("a file below", _name("below/rank-00000.safetensors"), _OUTSIDE),
    Damage("a file with a zero", _name("rank\0"), _OUTSIDE),
    Damage("a file without a name", _name(""), _OUTSIDE),
    Damage("a hidden file", _name(".metadata"), _OUTSIDE),
    Damage("the manifest as a file", _name(MANIFEST), _OUTSIDE),
    Damage("a file twice", _name(FILES[1]), r"manifest.json: names a file twice"),
    Damage("a hole", _matrix(lambda entry: entry[2].pop()), _COVER),
    Damage("an overlap", _matrix(lambda entry: entry[2].append(entry[2][0])), _COVER),
    Damage("an overlap and a hole", _matrix(lambda entry: entry[2][1].__setitem__(2, [0, 0])), _COVER),
    Damage("half an overlap", _matrix(lambda entry: entry[2][1].__setitem__(2, [1, 0])), _COVER),
    Damage("a chunk outside", _matrix(lambda entry: entry[2][1].__setitem__(2, [3, 0])), r"which lies outside of it"),
    Damage("a chunk of a point", _matrix(lambda entry: entry[2][1].__setitem__(2, [2])), r"which lies outside of it"),
    Damage("an offset outside", _matrix(lambda entry: entry[2][1].__setitem__(1, 10**9)), r"outside of rank-00001"),
    Damage("an offset near the end", _matrix(lambda entry: entry[2][0].__setitem__(1, 220)), r"outside of rank-00000"),
    Damage("data cut", lambda at: truncate(at / FILES[0], 1), r"rank-00000.safetensors: is truncated: it has"),
    Damage("data longer", lambda at: (at / FILES[0]).open("ab").write(b"x"), r"rank-00000.safetensors: is changed"),
    Damage("data flipped", lambda at: flip(at / FILES[1], -1, 128), r"rank-00001.safetensors is corrupted: its CRC-32"),
    Damage("a header flipped", lambda at: flip(at / FILES[1], 0), r"rank-00001.safetensors is corrupted: its CRC-32"),
    Damage("data swapped", _swap, r"rank-0000.\.safetensors"),
    Damage("data missing", lambda at: (at / FILES[1]).unlink(), r"rank-00001.safetensors is missing"),
    Damage("data a folder", lambda at: _as_folder(at / FILES[1]), r"rank-00001.safetensors: is no file"),
    Damage("data a pipe", lambda at: _as_pipe(at / FILES[1]), r"rank-00001.safetensors: is no file"),
    Damage("data a pickle", lambda at: _pickle_of_this_size(at / FILES[0]), r"rank-00000.safetensors is corrupted"),
    Damage(
        "data too many",
        lambda at: shutil.copy(at / FILES[1], at / "rank-00002.safetensors"),
        r"rank-00002.safetensors is not a file of this checkpoint",
    ),
]  # fmt: skip
