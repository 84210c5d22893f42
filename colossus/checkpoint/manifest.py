"""The manifest of a checkpoint: what is in it and where, as JSON. No torch.

``manifest.json`` is written last, so that a folder that has one is complete. It starts with a CRC-32 of what follows.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colossus import __version__
from colossus.checkpoint.dtypes import ITEM_BYTES
from colossus.checkpoint.errors import CheckpointError, DamagedCheckpoint
from colossus.checkpoint.tiling import is_tiling

FORMAT = "colossus.checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
#: what a manifest calls the tokenizer of a model: text is taken as bytes, or this file of the checkpoint says how
BYTES, TOKENIZER_FILE = "bytes", "tokenizer.json"

_PREFIX = re.compile(rb'\{"crc32": "([0-9a-f]{8})", "manifest": ')
#: within the first bytes of a manifest, behind the step
_SAVED_AT = re.compile(rb'"saved_at": (\d{1,12}(?:\.\d{1,12})?)[,}]')
_FIRST_BYTES = 256
_BEGINNING, _END = b'{"crc32": "', b"}\n"
#: a file in the checkpoint's folder; nothing that leads out of it
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")


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
        tokenizer: how text becomes the ids that the model was trained on: `BYTES`, `TOKENIZER_FILE` (one of ``files``,
            in the format of Hugging Face's tokenizers), or None, where the data did not say.
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
    tokenizer: str | None = None

    @property
    def num_bytes(self) -> int:
        """Of all files, the manifest not counted."""
        return sum(file.num_bytes for file in self.files.values())

    @property
    def is_weights_only(self) -> bool:
        """Whether it has nothing that a run could go on with: no step, no optimizer, no place in the data."""
        return bool(self.tensors) and not self.values

    def names(self, section: str) -> Iterator[str]:
        """The names in a section (``model``, ``optimizer``): keys without the section."""
        for key in self.tensors:
            if key.startswith(section + "/"):
                yield key[len(section) + 1 :]

    def shapes(self, section: str) -> dict[str, tuple[int, ...]]:
        """Full shapes of the tensors in a section, by name."""
        return {name: self.tensors[f"{section}/{name}"].shape for name in self.names(section)}

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
            "tokenizer": self.tokenizer,
        }
        text = json.dumps(body, default=str).encode()
        return b'{"crc32": "%08x", "manifest": ' % zlib.crc32(text) + text + b"}\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder.

    Raises:
        DamagedCheckpoint: when it is missing, truncated or corrupted.
        CheckpointError: when it cannot be read, or is of another version.
    """
    path = folder / MANIFEST
    body = _checked_body(path, _bytes_of(path))
    try:
        if body["format"] != FORMAT:
            raise DamagedCheckpoint(_FOREIGN)
        if body["version"] != VERSION:
            raise CheckpointError(
                f"has format version {body['version']}, written by colossus "
                f"{body.get('versions', {}).get('colossus', '?')}; this colossus ({__version__}) reads version "
                f"{VERSION}: use the one that wrote it"
            )
        return _parse(body)
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}") from None
    except _MALFORMED as error:
        raise DamagedCheckpoint(
            f"{path}: cannot be understood ({type(error).__name__}: {error}); take another checkpoint"
        ) from None


def saved_at(path: Path) -> float:
    """When a checkpoint was saved, from the first bytes of its manifest, whose checksum is not looked at; where it does
    not say, when the file was written.

    Raises:
        OSError: there is no such file.
    """
    modified = path.stat().st_mtime
    if path.is_file():  # to open a pipe would wait for whoever writes to it
        with contextlib.suppress(PermissionError), open(path, "rb") as file:
            if found := _SAVED_AT.search(file.read(_FIRST_BYTES)):
                return float(found[1])
    return modified


#: what a manifest raises whose checksum is right and whose content is not what colossus writes
_MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError)
_FOREIGN = "is not the manifest of a colossus checkpoint; take another checkpoint"


def _bytes_of(path: Path) -> bytes:
    try:
        if not path.is_file() and path.exists():
            raise DamagedCheckpoint(f"{path}: is no file; take another checkpoint")
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedCheckpoint(
            f"{path.parent}: is no checkpoint: there is no {MANIFEST} in it"
            + ("" if path.parent.exists() else ", the folder does not exist")
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None


def _checked_body(path: Path, data: bytes) -> dict[str, Any]:
    """What the manifest says, once its checksum is found right."""
    prefix = _PREFIX.match(data)
    if prefix is None:
        is_ours = bool(data) and (data[: len(_BEGINNING)] == _BEGINNING[: len(data)])
        what = "is truncated or corrupted" if is_ours or not data.strip(b"\0") else "is not one of colossus"
        raise DamagedCheckpoint(f"{path}: {what}: it has {len(data)} bytes; take another checkpoint")
    text = data[prefix.end() : -len(_END)]
    if not data.endswith(_END) or zlib.crc32(text) != int(prefix[1], 16):
        raise DamagedCheckpoint(
            f"{path}: is truncated or corrupted: its CRC-32 is {zlib.crc32(text):08x}, it was written with "
            f"{prefix[1].decode()}; take another checkpoint"
        )
    try:
        body = json.loads(text)
    except _MALFORMED as error:
        raise DamagedCheckpoint(f"{path}: is no JSON ({error}); take another checkpoint") from None
    if not isinstance(body, dict):
        raise DamagedCheckpoint(f"{path}: {_FOREIGN}")
    return body


def _parse(body: dict[str, Any]) -> Manifest:
    names = [name for name, _, _ in body["files"]]
    for name in names:
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name) or name == MANIFEST:
            raise DamagedCheckpoint(f"names a file {name!r}, which is no plain file name; take another checkpoint")
    if len(set(names)) != len(names):
        raise DamagedCheckpoint("names a file twice; take another checkpoint")
    files = {name: FileEntry(_count(size), int(crc, 16)) for name, size, crc in body["files"]}
    tensors = {}
    for key, (dtype, shape, chunks) in body["tensors"].items():
        entry = TensorEntry(
            dtype,
            tuple(map(_count, shape)),
            tuple(
                Chunk(names[_count(file)], _count(offset), tuple(map(_count, start)), tuple(map(_count, size)))
                for file, offset, start, size in chunks
            ),
        )
        _check(key, entry, files)
        tensors[key] = entry
    for name in ("versions", "plan", "config", "aliases", "values"):
        if not isinstance(body[name], dict):
            raise TypeError(f"{name} is a {type(body[name]).__name__}")
    for alias, name in body["aliases"].items():
        if f"model/{name}" not in tensors:
            raise KeyError(f"{alias} is another name of {name}, which is not there")
    tokenizer = body["tokenizer"]
    if tokenizer not in (None, BYTES) and (tokenizer != TOKENIZER_FILE or tokenizer not in files):
        raise DamagedCheckpoint(f"names a tokenizer {tokenizer!r:.40}, which is no file of it; take another checkpoint")
    return Manifest(
        _count(body["step"]),
        float(body["saved_at"]),
        body["versions"],
        body["plan"],
        body["config"],
        files,
        tensors,
        body["aliases"],
        body["values"],
        tokenizer,
    )


def _count(value: Any) -> int:
    """A whole number, not negative, and not something that could be made one."""
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r:.40} where a count is expected")
    return value


def _check(key: str, entry: TensorEntry, files: Mapping[str, FileEntry]) -> None:
    """That the chunks of a tensor lie in their files and cover it, each element once."""
    if entry.dtype not in ITEM_BYTES:
        raise CheckpointError(f"{key} has dtype {entry.dtype!r:.40}, which this colossus does not know")
    item = ITEM_BYTES[entry.dtype]
    for chunk in entry.chunks:
        if not len(chunk.start) == len(chunk.size) == len(entry.shape) or any(
            start + size > whole for start, size, whole in zip(chunk.start, chunk.size, entry.shape, strict=True)
        ):
            raise DamagedCheckpoint(
                f"{key} of shape {entry.shape} has a chunk at {chunk.start} of size {chunk.size}, which lies outside "
                f"of it; take another checkpoint"
            )
        if chunk.offset + chunk.num_elements * item > files[chunk.file].num_bytes:
            raise DamagedCheckpoint(
                f"{key} has a chunk of {chunk.num_elements * item} bytes at {chunk.offset}, which lies outside of "
                f"{chunk.file} with its {files[chunk.file].num_bytes} bytes; take another checkpoint"
            )
    if not is_tiling(entry.shape, [(chunk.start, chunk.size) for chunk in entry.chunks]):
        held = sum(chunk.num_elements for chunk in entry.chunks)
        raise DamagedCheckpoint(
            f"{key} of shape {entry.shape} has {math.prod(entry.shape)} elements, its {len(entry.chunks)} chunks have "
            f"{held} and do not cover it once: a rank's part is missing, or two ranks wrote the same; take another "
            f"checkpoint"
        )
