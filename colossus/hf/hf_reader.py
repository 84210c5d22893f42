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
from colossus.hf.family import Part, Row
from colossus.hf.hf_folder import HFFolder, StoredTensor, read_folder
from colossus.layout.layout import Box


class HFReader(CheckpointReader):
    """A model folder of Hugging Face (`colossus.hf.families`), read like a checkpoint that has weights only.

    It reads only the boxes that a caller asks for, through a buffer of one block (1 MiB), also from fused tensors
    (GPT-2's ``c_attn``) and transposed ones (its ``Conv1D``, gpt-oss's experts).

    Raises:
        CheckpointError: see `read_folder`.

    Attributes:
        folder: the model folder.
        manifest: ``tensors`` by our names, without chunks; ``config`` with the model; files without checksums.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        placed, self.manifest = self._content()
        self._places: dict[str, list[tuple[Row, StoredTensor, Part, int]]] = defaultdict(list)
        for tensor, stored in placed:
            for part, first in tensor.located():
                self._places[f"model/{part.name}"].append((tensor, stored, part, first))
        self._boxes = BoxReader()
        self._descriptors: dict[str, int] = {}

    def _content(self) -> HFFolder:
        return read_folder(self.folder)

    def read_box(self, key: str, box: Box, out: Tensor) -> None:
        """Fill ``out`` with a box of a parameter, (start, stop) of every dim; ``out`` has the shape of the box.

        Raises:
            CheckpointError: there is no such parameter, or its file cannot be read.
        """
        entry = self.entry(key)
        assert len(box) == len(entry.shape)
        for tensor, stored, part, first in self._places[key]:
            # the file's whole array as a chunk of the parameter: the parameter lies in it, or it lies in the parameter
            (low, high), *others = box
            shifted = tensor.in_file(((low + first, high + first), *others), part)
            chunk = Chunk(stored.file, stored.offset, (0,) * len(tensor.rows), tensor.rows)
            turned = out.mT if tensor.transposed else out
            turned = turned.unsqueeze(-1) if tensor.interleaved else turned
            self._read_chunk(key, chunk, DTYPES[stored.dtype], shifted, turned)

    def verify(self, group: AxisGroup | None = None, on_block: Callable[[], None] = lambda: None) -> None:
        """Check nothing: Hugging Face's folders have no checksums, and `read_folder` has checked headers and sizes."""
