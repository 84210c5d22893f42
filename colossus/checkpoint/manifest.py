"""The manifest of a checkpoint: what is in it and where, as JSON. No torch.

``manifest.json`` is written last, so that a folder that has one is complete. It starts with a CRC-32 of what follows.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colossus.checkpoint.errors import CheckpointError

FORMAT = "colossus.checkpoint"
VERSION = 1
MANIFEST = "manifest.json"

_PREFIX = re.compile(rb'\{"crc32": "([0-9a-f]{8})", "manifest": ')

#: bytes of an element of each dtype that a checkpoint can hold, by torch's name
ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "complex128": 16,
    "complex64": 8,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
}


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, row-major in one file.

    Attributes:
        file: name within the checkpoint's folder.
        offset: of its first byte in the file.
        start, size: of the box, in elements, for each dim of the tensor.
    """

    file: str
    offset: int
    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.size)


@dataclass(frozen=True)
class TensorEntry:
    """A whole tensor: its dtype by torch's name, its full shape, and the chunks that cover it without overlap."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint: its size in bytes and its CRC-32."""

    num_bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: optimizer steps done.
        saved_at: seconds since 1970.
        versions: of colossus, torch and python that wrote it.
        plan: ``axes`` (atomic axis -> ranks), ``text``.
        config: of the run, as `colossus.config.as_dict` gives it; empty where there was none.
        files: by name.
        tensors: by key, ``model/<name>``, ``optimizer/<name>/<entry>``, and those that values refer to.
        aliases: other names of tied parameters and buffers -> the name under which the value is.
        values: everything that is no tensor, by path, encoded (`colossus.checkpoint.values`).
    """

    step: int
    saved_at: float
    versions: Mapping[str, str]
    plan: Mapping[str, Any]
    config: Mapping[str, Any]
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]
    aliases: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Of all files, the manifest not counted."""
        return sum(file.num_bytes for file in self.files.values())

    def names(self, section: str) -> Iterator[str]:
        """The names in a section (``model``, ``optimizer``): keys without the section."""
        for key in self.tensors:
            if key.startswith(section + "/"):
                yield key[len(section) + 1 :]

    def to_bytes(self) -> bytes:
        numbers = {name: number for number, name in enumerate(self.files)}
        body = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "saved_at": self.saved_at,
            "versions": dict(self.versions),
            "plan": dict(self.plan),
            "config": dict(self.config),
            "files": [[name, file.num_bytes, f"{file.crc32:08x}"] for name, file in self.files.items()],
            "tensors": {
                key: [
                    entry.dtype,
                    list(entry.shape),
                    [[numbers[each.file], each.offset, list(each.start), list(each.size)] for each in entry.chunks],
                ]
                for key, entry in self.tensors.items()
            },
            "aliases": dict(self.aliases),
            "values": dict(self.values),
        }
        text = json.dumps(body, default=str).encode()
        return b'{"crc32": "%08x", "manifest": ' % zlib.crc32(text) + text + b"}\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder.

    Raises:
        CheckpointError: when there is none, or it is truncated, corrupted, foreign or of another version.
    """
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{folder}: is no checkpoint: there is no {MANIFEST} in it"
            + ("" if folder.exists() else ", the folder does not exist")
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    prefix = _PREFIX.match(data)
    if prefix is None:
        raise CheckpointError(f"{path}: is not the manifest of a colossus checkpoint")
    text = data[prefix.end() :].removesuffix(b"\n").removesuffix(b"}")
    if zlib.crc32(text) != int(prefix[1], 16):
        raise CheckpointError(
            f"{path}: is truncated or corrupted: its CRC-32 is {zlib.crc32(text):08x}, it was written with "
            f"{prefix[1].decode()}; take another checkpoint"
        )
    try:
        body = json.loads(text)
        if body["format"] != FORMAT:
            raise CheckpointError(f"{path}: is not the manifest of a colossus checkpoint")
        if body["version"] != VERSION:
            raise CheckpointError(
                f"{path}: has format version {body['version']}, written by colossus "
                f"{body.get('versions', {}).get('colossus', '?')}; this colossus reads version {VERSION}"
            )
        return _parse(body)
    except CheckpointError as error:
        raise error if str(error).startswith(str(path)) else CheckpointError(f"{path}: {error}") from None
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{path}: cannot be understood ({type(error).__name__}: {error})") from None


def _parse(body: dict[str, Any]) -> Manifest:
    names = [str(name) for name, _, _ in body["files"]]
    for name in names:
        if not name or "/" in name or "\\" in name or name.startswith("."):
            raise CheckpointError(f"names a file {name!r}, which is no plain file name")
    files = {str(name): FileEntry(int(size), int(crc, 16)) for name, size, crc in body["files"]}
    tensors = {}
    for key, (dtype, shape, chunks) in body["tensors"].items():
        entry = TensorEntry(
            dtype,
            tuple(map(int, shape)),
            tuple(
                Chunk(names[file], int(offset), tuple(map(int, start)), tuple(map(int, size)))
                for file, offset, start, size in chunks
            ),
        )
        _check(key, entry, files)
        tensors[key] = entry
    return Manifest(
        int(body["step"]),
        float(body["saved_at"]),
        body["versions"],
        body["plan"],
        body["config"],
        files,
        tensors,
        body["aliases"],
        body["values"],
    )


def _check(key: str, entry: TensorEntry, files: Mapping[str, FileEntry]) -> None:
    """That the chunks of a tensor lie in their files and cover it: together they have its number of elements."""
    if entry.dtype not in ITEM_BYTES:
        raise CheckpointError(f"{key} has dtype {entry.dtype}, which this colossus does not know")
    item = ITEM_BYTES[entry.dtype]
    smallest = 0 if 0 in entry.shape else 1
    for chunk in entry.chunks:
        fits = len(chunk.start) == len(chunk.size) == len(entry.shape) and all(
            start >= 0 and size >= smallest and start + size <= whole
            for start, size, whole in zip(chunk.start, chunk.size, entry.shape, strict=True)
        )
        if not fits:
            raise CheckpointError(f"{key} of shape {entry.shape} has a chunk at {chunk.start} of size {chunk.size}")
        if chunk.offset < 0 or chunk.offset + chunk.num_elements * item > files[chunk.file].num_bytes:
            raise CheckpointError(f"{key} has a chunk that lies outside of {chunk.file}")
    held = sum(chunk.num_elements for chunk in entry.chunks)
    if held != math.prod(entry.shape):
        raise CheckpointError(
            f"{key} of shape {entry.shape} has {math.prod(entry.shape)} elements, its chunks have {held}: a rank's "
            f"part is missing, or two ranks wrote the same"
        )
