"""The reader of Hugging Face's model folders: any box of any parameter, by our names, from its place in a file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from colossus.checkpoint.manifest import Chunk
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.tensor_file import DTYPES, BoxReader
from colossus.context.groups import AxisGroup
from colossus.hf.family import Row
from colossus.hf.hf_folder import StoredTensor, read_folder
from colossus.layout.layout import Box


class HFReader(CheckpointReader):
    """A model folder of Hugging Face (`colossus.hf.families`), read like a checkpoint that has weights only.

    It reads only the boxes that a caller asks for, through a buffer of one block (1 MiB), also from fused tensors
    (GPT-2's ``c_attn``) and transposed ones (its ``Conv1D``).

    Raises:
        CheckpointError: see `read_folder`.

    Attributes:
        folder: the model folder.
        manifest: ``tensors`` by our names, without chunks; ``config`` with the model; files without checksums.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        placed, self.manifest = read_folder(self.folder)
        self._places: dict[str, list[tuple[Row, StoredTensor, int]]] = defaultdict(list)
        for tensor, stored in placed:
            for part, first in tensor.located():
                self._places[f"model/{part.name}"].append((tensor, stored, first))
        self._boxes = BoxReader()
        self._descriptors: dict[str, int] = {}

    def read_box(self, key: str, box: Box, out: Tensor) -> None:
        """Fill ``out`` with a box of a parameter, (start, stop) of every dim; ``out`` has the shape of the box.

        Raises:
            CheckpointError: there is no such parameter, or its file cannot be read.
        """
        entry = self.entry(key)
        assert len(box) == len(entry.shape)
        for tensor, stored, first in self._places[key]:
            rows = tensor.rows
            # the file's whole array as a chunk of the parameter: the parameter lies in it, or it lies in the parameter
            start = (-first, *(0 for _ in rows[1:]))
            chunk = Chunk(stored.file, stored.offset, start[::-1] if tensor.transposed else start, rows)
            turned = (box[::-1], out.T) if tensor.transposed else (box, out)
            self._read_chunk(key, chunk, DTYPES[stored.dtype], *turned)

    def verify(self, group: AxisGroup | None = None, on_block: Callable[[], None] = lambda: None) -> None:
        """Check nothing: Hugging Face's folders have no checksums, and `read_folder` has checked headers and sizes."""
