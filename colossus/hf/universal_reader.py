"""The reader of DeepSpeed's universal checkpoints: any box of any parameter, by our names, from mapped files."""

from __future__ import annotations

import torch
from torch import Tensor

from colossus.checkpoint.manifest import Chunk
from colossus.hf.hf_folder import HFFolder
from colossus.hf.hf_reader import HFReader
from colossus.hf.universal_folder import read_parameter, read_universal
from colossus.layout.layout import Box


class UniversalReader(HFReader):
    """A universal checkpoint with Hugging Face's names, read like a checkpoint that has weights only.

    Raises:
        CheckpointError: see `read_universal`.
    """

    def _content(self) -> HFFolder:
        return read_universal(self.folder)

    def _read_chunk(self, key: str, chunk: Chunk, dtype: torch.dtype, box: Box, out: Tensor) -> None:
        value = read_parameter(self.folder / chunk.file)[0].reshape(chunk.size)
        for dim, (size, (low, high)) in enumerate(zip(chunk.size, box, strict=True)):
            first, last = max(0, low), min(size, high)
            if first >= last:
                return
            value, out = value.narrow(dim, first, last - first), out.narrow(dim, first - low, last - first)
        out.copy_(value)
