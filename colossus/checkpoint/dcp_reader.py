"""The reader of folders of ``torch.distributed.checkpoint``: any box of any tensor, by the names of the saved model."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colossus.checkpoint.dcp_folder import read_dcp
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.stored_place import StoredPlace
from colossus.context.groups import AxisGroup
from colossus.layout.layout import Box


class DCPReader(CheckpointReader):
    """A folder of DCP, read like a checkpoint that has weights only.

    A chunk, which is what one rank had of a tensor, is read whole and kept until another one is asked for.

    Raises:
        CheckpointError: see `read_dcp`.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.manifest, self._places, self._chunks = read_dcp(self.folder)
        self._last: tuple[tuple[str, int], Tensor] | None = None
        self._descriptors: dict[str, int] = {}

    def read_box(self, key: str, box: Box, out: Tensor) -> None:
        """Fill ``out`` with a box of a tensor, (start, stop) of every dim; ``out`` has the shape of the box.

        Raises:
            CheckpointError: there is no such tensor, or its file cannot be read.
        """
        self.entry(key)
        place = self._places[key]
        if place.row_there is None:
            return self._read_stored(place, box, out)
        (start, stop), *others = box
        rows_there = [place.row_there(row) for row in range(start, stop)]
        if not rows_there:
            return None
        first, last = min(rows_there), max(rows_there) + 1
        rows = out.new_empty((last - first, *out.shape[1:]))
        self._read_stored(place, ((first, last), *others), rows)
        out.copy_(rows[[row - first for row in rows_there]])
        return None

    def _read_stored(self, place: StoredPlace, box: Box, out: Tensor) -> None:
        """Fill ``out`` with a box of a tensor as the folder has it, in the layer of the place."""
        if place.layer is not None:
            box, out = ((place.layer, place.layer + 1), *box), out.unsqueeze(0)
        for chunk, info in self._chunks[place.name]:
            spans = [
                (max(start, first), min(stop, first + size))
                for (start, stop), first, size in zip(box, chunk.offsets, chunk.sizes, strict=True)
            ]
            if all(start < stop for start, stop in spans):
                value = self._read(place.name, info, tuple(chunk.sizes))
                in_chunk = tuple(
                    slice(a - first, b - first) for (a, b), first in zip(spans, chunk.offsets, strict=True)
                )
                in_box = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(spans, box, strict=True))
                out[in_box].copy_(value[in_chunk])

    def _read(self, name: str, info: Any, sizes: tuple[int, ...]) -> Tensor:
        place = info.relative_path, info.offset
        if self._last is None or self._last[0] != place:
            try:
                with (self.folder / info.relative_path).open("rb") as file:
                    file.seek(info.offset)
                    value = torch.load(io.BytesIO(file.read(info.length)), map_location="cpu", weights_only=True)
            except Exception as error:  # torch raises many types for a damaged file
                raise CheckpointError(f"{self.folder / info.relative_path}: {name} cannot be read: {error}") from error
            if not isinstance(value, Tensor) or tuple(value.shape) != sizes:
                raise CheckpointError(f"{self.folder / info.relative_path}: {name} is not the tensor {list(sizes)}")
            self._last = place, value
        return self._last[1]

    def verify(self, group: AxisGroup | None = None, on_block: Callable[[], None] = lambda: None) -> None:
        """Check nothing: these folders have no checksums, and `read_dcp` has checked the sizes of their files."""
