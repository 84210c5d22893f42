"""What a rank holds of a whole tensor: the unit in which checkpoints are written and read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from colossus.layout.layout import Box


@dataclass(frozen=True)
class HeldTensor:
    """A rank's box of a tensor.

    Attributes:
        key: of the tensor in the checkpoint.
        shape: full shape.
        box: (start, stop) of every dim; may be empty.
        local: a view of the rank's memory, of the shape of the box.
        writes: whether this rank writes the box, of those that hold it.
    """

    key: str
    shape: tuple[int, ...]
    box: Box
    local: Tensor
    writes: bool = True

    @classmethod
    def whole(cls, key: str, tensor: Tensor, *, writes: bool = True) -> HeldTensor:
        shape = tuple(tensor.shape)
        return cls(key, shape, tuple((0, size) for size in shape), tensor, writes)

    @classmethod
    def of_chunk(cls, key: str, shape: Sequence[int], box: Box, chunk: Tensor, *, writes: bool) -> HeldTensor:
        """Of a buffer that may be larger than the box, which then fills the beginning of each dim."""
        local = chunk.detach()
        for dim, (start, stop) in enumerate(box):
            if local.shape[dim] != stop - start:
                local = local.narrow(dim, 0, stop - start)
        return cls(key, tuple(shape), box, local, writes)
