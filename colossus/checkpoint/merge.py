"""One manifest of what the ranks of a save say of their parts."""

from __future__ import annotations

import platform
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from colossus import __version__
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.manifest import Chunk, FileEntry, Manifest, TensorEntry


@dataclass(frozen=True)
class About:
    """What a manifest says of a run, beside what ranks write.

    Attributes:
        tokenizer: as of `Manifest`.
        files: further files of the checkpoint, by name.
    """

    step: int
    plan: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)


def merge(parts: Sequence[Mapping[str, Any]], about: About) -> Manifest:
    """The manifest of a checkpoint from what its ranks say of their parts."""
    files: dict[str, FileEntry] = {}
    found: dict[str, tuple[str, tuple[int, ...], list[Chunk]]] = {}
    values: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    for part in parts:
        values |= part["values"]
        aliases |= part["aliases"]
        if part["file"] is not None:
            name, num_bytes, crc = part["file"]
            files[name] = FileEntry(num_bytes, crc)
        for key, dtype, shape, offset, start, size in part["tensors"]:
            held = found.setdefault(key, (dtype, tuple(shape), []))
            if held[:2] != (dtype, tuple(shape)):
                raise CheckpointError(f"{key} is {held[0]} {held[1]} on one rank and {dtype} {tuple(shape)} on another")
            held[2].append(Chunk(name, offset, tuple(start), tuple(size)))
    files |= {name: FileEntry(len(data), zlib.crc32(data)) for name, data in about.files.items()}
    return Manifest(
        about.step,
        time.time(),
        {"colossus": __version__, "torch": torch.__version__, "python": platform.python_version()},
        about.plan,
        about.config,
        files,
        {key: TensorEntry(dtype, shape, tuple(chunks)) for key, (dtype, shape, chunks) in found.items()},
        aliases,
        values,
        about.tokenizer,
    )
