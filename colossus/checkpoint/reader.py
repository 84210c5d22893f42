"""A reader of any box of any tensor in a checkpoint, whichever ranks wrote it. No code is run from a file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from colossus.checkpoint.durable import problem_of
from colossus.checkpoint.errors import CheckpointError, DamagedCheckpoint
from colossus.checkpoint.folder import require_files
from colossus.checkpoint.manifest import Chunk, TensorEntry
from colossus.checkpoint.tensor_file import DTYPES, BoxReader, ReadAt, read_at
from colossus.comm.objects import all_gather_object, await_all
from colossus.context.groups import AxisGroup
from colossus.layout.layout import Box

#: most files that are open at a time
_MOST_OPEN = 64


class CheckpointReader:
    """A reader of a checkpoint folder; ``with CheckpointReader(folder) as reader`` closes its files.

    Raises:
        CheckpointError: if the manifest or a file is missing or truncated, or of another version (checksums: `verify`).

    Attributes:
        folder: folder of the checkpoint.
        manifest: its manifest.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.manifest = require_files(self.folder)
        self._boxes = BoxReader()
        self._descriptors: dict[str, int] = {}

    def entry(self, key: str) -> TensorEntry:
        """Return the manifest's entry of a tensor (``model/norm.weight``): dtype, full shape, chunks.

        Raises:
            CheckpointError: if there is no tensor of this key.
        """
        if key not in self.manifest.tensors:
            raise CheckpointError(f"{self.folder}: has no tensor {key!r}")
        return self.manifest.tensors[key]

    def read_box(self, key: str, box: Box, out: Tensor) -> None:
        """Fill ``out`` with a box of a tensor.

        Args:
            key: key of the tensor.
            box: (start, stop) of every dim.
            out: a tensor of the shape of the box, of any dtype.

        Raises:
            CheckpointError: if there is no such tensor, or its file cannot be read.
        """
        entry = self.entry(key)
        assert len(box) == len(entry.shape)
        for chunk in entry.chunks:
            self._read_chunk(key, chunk, DTYPES[entry.dtype], box, out)

    def _read_chunk(self, key: str, chunk: Chunk, dtype: torch.dtype, box: Box, out: Tensor) -> None:
        try:
            self._boxes.read(self._file(chunk.file), chunk, dtype, box, out)
        except (OSError, CheckpointError) as error:
            raise CheckpointError(f"{self.folder / chunk.file}: {key} cannot be read: {error}") from error

    def tensor(self, key: str) -> Tensor:
        """Return a whole tensor, on the host."""
        entry = self.entry(key)
        out = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        self.read_box(key, tuple((0, size) for size in entry.shape), out)
        return out

    def verify(self, group: AxisGroup | None = None, on_block: Callable[[], None] = lambda: None) -> None:
        """Compare the checksums of all files, which the ranks of a group divide. Collective over the group.

        Args:
            group: ranks that read the same checkpoint; None: this process compares all files.
            on_block: called after each block that is read.

        Raises:
            DamagedCheckpoint: on all of its ranks, naming the files.
        """
        names = sorted(self.manifest.files, key=lambda name: -self.manifest.files[name].num_bytes)
        mine = names if group is None else names[group.index :: group.size]
        problems = [problem_of(self.folder / name, self.manifest.files[name].crc32, on_block) for name in mine]
        if group is not None:
            await_all(group)
            problems = [problem for of_rank in all_gather_object(problems, group) for problem in of_rank]
        if texts := [problem for problem in problems if problem is not None]:
            raise DamagedCheckpoint(f"{self.folder}: {'; '.join(texts)}: take another checkpoint")

    def _file(self, name: str) -> ReadAt:
        return read_at(self._open(name))

    def _open(self, name: str) -> int:
        if name not in self._descriptors:
            if len(self._descriptors) >= _MOST_OPEN:
                self.close()
            self._descriptors[name] = os.open(self.folder / name, os.O_RDONLY)
        return self._descriptors[name]

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._descriptors.clear()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
