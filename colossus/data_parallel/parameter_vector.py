"""The parameters of a rank as one vector, which can be sent, mixed and averaged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from colossus.comm.flat_buffer import FlatBuffer
from colossus.context.precision import LOW


class ParameterVector(FlatBuffer):
    """A rank's tensors, and their places in one buffer.

    Args:
        tensors: stored parameters, say, in the same order on all ranks that exchange vectors.
        wide: numbers of 16 bits are float32 in the buffer, so that they can be summed.

    Attributes:
        tensors: the tensors.
        device: the device of the tensors.
        dtypes: the dtype of each tensor in the buffer.
    """

    def __init__(self, tensors: Sequence[Tensor], *, wide: bool = False) -> None:
        self.tensors = list(tensors)
        self.device = self.tensors[0].device if self.tensors else torch.device("cpu")
        self.dtypes = [torch.float32 if wide and tensor.dtype in LOW else tensor.dtype for tensor in self.tensors]
        super().__init__((dtype, tensor.shape) for dtype, tensor in zip(self.dtypes, self.tensors, strict=True))
        #: a buffer on the device for copies to and from the host
        self._on_device: Tensor | None = None

    def empty(self) -> Tensor:
        """Return a buffer, uint8 [nbytes]."""
        return torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)

    def on_device(self, buffer: Tensor) -> Tensor:
        """Return a buffer on the device of the tensors; one on the host is copied, and valid until the next call."""
        return buffer if buffer.device == self.device else self._staging().copy_(buffer)

    def _staging(self) -> Tensor:
        if self._on_device is None:
            self._on_device = self.empty()
        return self._on_device

    @torch.no_grad()
    def pack(self, buffer: Tensor) -> None:
        """Copy the tensors into a buffer; for one on the host, by one copy for which this waits."""
        if not self.tensors:
            return
        packed = buffer if buffer.device == self.device else self._staging()
        torch._foreach_copy_(self.views(packed), [tensor.detach() for tensor in self.tensors])
        if packed is not buffer:
            buffer.copy_(packed)

    @torch.no_grad()
    def unpack(self, buffer: Tensor) -> None:
        """Copy a buffer into the tensors."""
        if self.tensors:
            torch._foreach_copy_([tensor.detach() for tensor in self.tensors], self.views(buffer))

    @torch.no_grad()
    def add(self, buffer: Tensor, alpha: float = 1.0) -> None:
        """Add ``alpha`` times a buffer to the tensors; ``-alpha`` adds the opposite to the last bit."""
        if self.tensors:
            views = self.views(self.on_device(buffer))
            torch._foreach_add_([tensor.detach() for tensor in self.tensors], views, alpha=alpha)
