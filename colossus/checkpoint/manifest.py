"""The manifest of a checkpoint: its tensors and values and where they are, as JSON. No torch.

``manifest.json`` is written last, so that a folder that has one is complete. It begins with a CRC-32 of the rest.
"""

from __future__ import annotations

import itertools
import json
import math
import platform
import re
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from colossus import __version__
from colossus.checkpoint.errors import CheckpointError, DamagedCheckpoint

FORMAT = "colossus.checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
#: values of a manifest's ``tokenizer``: token ids are bytes, or this file of the checkpoint defines them
BYTES, TOKENIZER_FILE = "bytes", "tokenizer.json"

#: cells between the edges of a tensor's chunks
_MOST_CELLS = 1 << 26
#: dtypes by torch's names: bytes of an element, and its name in safetensors; complex numbers are stored as their real
#: and imaginary parts
_DTYPES = {
    "float64": (8, "F64"),
    "float32": (4, "F32"),
    "float16": (2, "F16"),
    "bfloat16": (2, "BF16"),
    "float8_e4m3fn": (1, "F8_E4M3"),
    "float8_e5m2": (1, "F8_E5M2"),
    "complex128": (16, "F64"),
    "complex64": (8, "F32"),
    "int64": (8, "I64"),
    "int32": (4, "I32"),
    "int16": (2, "I16"),
    "int8": (1, "I8"),
    "uint64": (8, "U64"),
    "uint32": (4, "U32"),
    "uint16": (2, "U16"),
    "uint8": (1, "U8"),
    "bool": (1, "BOOL"),
}
ITEM_BYTES = {name: num_bytes for name, (num_bytes, _) in _DTYPES.items()}
SAFETENSORS_DTYPES = {name: code for name, (_, code) in _DTYPES.items()}

_FILE = re.compile(rb'\{"crc32": "([0-9a-f]{8})", "manifest": (.*)\}\n', re.DOTALL)
#: name of a file in the checkpoint's folder; no path that leads out of it
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, row-major in one file from an offset in bytes; start and size of each dim in elements."""

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
    """The content of a checkpoint.

    Attributes:
        step: optimizer steps done.
        saved_at: seconds since 1970.
        versions: versions of colossus, torch and python that wrote it.
        plan: ``axes`` (atomic axis -> ranks), ``text``.
        config: config of the run, as `colossus.config.as_dict` returns it; empty where there was none.
        files: files by name.
        tensors: tensors by key: ``model/<name>``, ``optimizer/<name>/<entry>``, and those that values refer to.
        aliases: other names of tied parameters and buffers -> the name under which the value is.
        values: all other state by path, encoded (`colossus.checkpoint.values`).
        tokenizer: how text becomes the ids that the model was trained on: `BYTES`, `TOKENIZER_FILE` (one of ``files``,
            in the format of Hugging Face's tokenizers), or None if the data does not define it.
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
        """Bytes of all files but the manifest."""
        return sum(file.num_bytes for file in self.files.values())

    @property
    def is_weights_only(self) -> bool:
        """Return whether no run can resume from it: it has no step, no optimizer, no place in the data."""
        return bool(self.tensors) and not self.values

    def names(self, section: str) -> Iterator[str]:
        """Yield the names in a section (``model``, ``optimizer``): keys without the section."""
        for key in self.tensors:
            if key.startswith(section + "/"):
                yield key[len(section) + 1 :]

    def shapes(self, section: str) -> dict[str, tuple[int, ...]]:
        """Return the full shapes of the tensors in a section, by name."""
        return {name: self.tensors[f"{section}/{name}"].shape for name in self.names(section)}

    def to_bytes(self) -> bytes:
        numbers = {name: number for number, name in enumerate(self.files)}
        body = vars(self) | {
            "format": FORMAT,
            "version": VERSION,
            "files": [[name, file.num_bytes, f"{file.crc32:08x}"] for name, file in self.files.items()],
            "tensors": {
                key: [
                    entry.dtype,
                    entry.shape,
                    [[numbers[chunk.file], chunk.offset, chunk.start, chunk.size] for chunk in entry.chunks],
                ]
                for key, entry in self.tensors.items()
            },
        }
        text = json.dumps(body, default=str).encode()
        return b'{"crc32": "%08x", "manifest": ' % zlib.crc32(text) + text + b"}\n"


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint folder; raise as `folder.require_files` does."""
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedCheckpoint(f"{folder}: is no checkpoint: there is no {MANIFEST} in it") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    match = _FILE.fullmatch(data)
    if match is None or zlib.crc32(match[2]) != int(match[1], 16):
        raise DamagedCheckpoint(f"{path}: is truncated or corrupted, or not one of colossus; take another checkpoint")
    try:
        body = json.loads(match[2])
        if body["format"] != FORMAT:
            raise ValueError(f"format {body['format']!r:.40} is not {FORMAT}")
        if body["version"] != VERSION:
            raise CheckpointError(
                f"{path}: has format version {body['version']}; this colossus ({__version__}) reads version {VERSION}"
            )
        return _parse(body)
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise DamagedCheckpoint(
            f"{path}: cannot be understood ({type(error).__name__}: {error}); take another checkpoint"
        ) from None


def _parse(body: Mapping[str, Any]) -> Manifest:
    """Return the manifest of its JSON. Raise if a file name leads elsewhere or chunks do not cover their tensor."""
    names = [name for name, _, _ in body["files"]]
    for name in names:
        if not FILE_NAME.fullmatch(name) or name == MANIFEST:
            raise ValueError(f"the file {name!r} is no plain file name")
    files = {name: FileEntry(int(num_bytes), int(crc, 16)) for name, num_bytes, crc in body["files"]}
    tensors = {
        key: TensorEntry(
            dtype,
            tuple(shape),
            tuple(Chunk(names[file], offset, tuple(start), tuple(size)) for file, offset, start, size in chunks),
        )
        for key, (dtype, shape, chunks) in body["tensors"].items()
    }
    for key, entry in tensors.items():
        _require_covered(key, entry)
        _require_in_files(key, entry, files)
    unchanged = {key: dict(body[key]) for key in ("versions", "plan", "config", "aliases", "values")}
    return Manifest(
        step=int(body["step"]),
        saved_at=float(body["saved_at"]),
        files=files,
        tensors=tensors,
        tokenizer=body["tokenizer"],
        **unchanged,
    )


def _require_covered(key: str, entry: TensorEntry) -> None:
    """Raise ValueError unless every element is in one chunk, and no chunk goes beyond the tensor."""
    chunks = [chunk for chunk in entry.chunks if chunk.num_elements]
    edges = []
    for dim, size in enumerate(entry.shape):
        ends = [(chunk.start[dim], chunk.start[dim] + chunk.size[dim]) for chunk in chunks]
        if beyond := [(start, stop) for start, stop in ends if not 0 <= start < stop <= size]:
            raise ValueError(f"{key} {entry.shape}: a chunk goes from {beyond[0][0]} to {beyond[0][1]} in dim {dim}")
        edges.append({edge: index for index, edge in enumerate(sorted({0, size, *itertools.chain(*ends)}))})
    # cells between all edges of chunks; their number is about that of the chunks, unless they are cut at random
    cells = [max(len(indices) - 1, 0) for indices in edges]
    if math.prod(cells) > _MOST_CELLS:
        raise ValueError(f"{key} {entry.shape}: its {len(chunks)} chunks are no parts of a grid")
    num_chunks = np.zeros(cells, np.int32)
    for chunk in chunks:
        corner = zip(edges, chunk.start, chunk.size, strict=True)
        num_chunks[tuple(slice(at[start], at[start + size]) for at, start, size in corner)] += 1
    if not (num_chunks == 1).all():
        raise ValueError(f"{key} {entry.shape} is not covered once by its {len(entry.chunks)} chunks")


def _require_in_files(key: str, entry: TensorEntry, files: Mapping[str, FileEntry]) -> None:
    """Raise ValueError where a chunk goes beyond its file."""
    item = ITEM_BYTES[entry.dtype]
    for chunk in entry.chunks:
        end = chunk.offset + chunk.num_elements * item
        if chunk.offset < 0 or end > files[chunk.file].num_bytes:
            raise ValueError(
                f"a chunk of {key} goes from byte {chunk.offset} to {end} of {chunk.file}, which has "
                f"{files[chunk.file].num_bytes}"
            )


# -- of a save --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class About:
    """Facts about a run in a manifest, beside the parts of its ranks, and further files of the checkpoint, by name."""

    step: int
    plan: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)


def merge(parts: Sequence[Mapping[str, Any]], about: About) -> Manifest:
    """Return the manifest of a checkpoint from the parts of its ranks."""
    files: dict[str, FileEntry] = {}
    merged: dict[str, tuple[str, tuple[int, ...], list[Chunk]]] = {}
    values: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    for part in parts:
        values |= part["values"]
        aliases |= part["aliases"]
        if part["file"] is not None:
            name, num_bytes, crc = part["file"]
            files[name] = FileEntry(num_bytes, crc)
        for key, dtype, shape, offset, start, size in part["tensors"]:
            first = merged.setdefault(key, (dtype, tuple(shape), []))
            if first[:2] != (dtype, tuple(shape)):
                raise CheckpointError(
                    f"{key} is {first[0]} {first[1]} on one rank and {dtype} {tuple(shape)} on another"
                )
            first[2].append(Chunk(name, offset, tuple(start), tuple(size)))
    files |= {name: FileEntry(len(data), zlib.crc32(data)) for name, data in about.files.items()}
    tensors = {key: TensorEntry(dtype, shape, tuple(chunks)) for key, (dtype, shape, chunks) in merged.items()}
    versions = {"colossus": __version__, "torch": metadata.version("torch"), "python": platform.python_version()}
    return Manifest(
        about.step, time.time(), versions, about.plan, about.config, files, tensors, aliases, values, about.tokenizer
    )
