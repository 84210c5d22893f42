"""Parts of a model whose parameters are averaged together."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from colossus.comm.shared_memory import SLOT_BYTES
from colossus.data_parallel.parameter_vector import ParameterVector


class Fragment:
    """Some parameters of this rank.

    Args:
        params: as they are stored.
        tied: ids of those that other stages of a pipeline hold, too. They travel in chunks of their own: the order in
            which a collective adds depends on where in its buffer a number is, and copies are to stay alike to the bit.

    Attributes:
        params: those that are tied first.
        tokens: on which the replica has trained since the fragment was averaged, float64 scalar.
        anchor: of each parameter the value that all replicas began the round with; None before the first round.
        momentum: of the outer step, for each parameter; None where there is none.
    """

    def __init__(self, params: Iterable[nn.Parameter], tied: Container[int], device: torch.device) -> None:
        self.params = sorted(params, key=lambda param: id(param) not in tied)
        self.vector = ParameterVector([param.detach() for param in self.params], wide=True)
        self._num_tied: dict[torch.dtype, int] = {}
        for param, dtype in zip(self.params, self.vector.dtypes, strict=True):
            if id(param) in tied:
                self._num_tied[dtype] = self._num_tied.get(dtype, 0) + param.numel()
        self._device = device
        self.forget_tokens()
        self.anchor: list[Tensor] | None = None
        self.momentum: list[Tensor] | None = None

    def forget_tokens(self) -> None:
        """A round begins."""
        self.tokens = torch.zeros((), dtype=torch.float64, device=self._device)

    def packed(self) -> Tensor:
        """The parameters in a new buffer."""
        buffer = self.vector.empty()
        self.vector.pack(buffer)
        return buffer

    def chunks(self, buffer: Tensor) -> Iterator[Tensor]:
        """A buffer as numbers, in pieces of a size that one collective takes well."""
        for part in self.vector.parts(buffer):
            num_tied = self._num_tied.get(part.dtype, 0)
            for piece in part.split([num_tied, part.numel() - num_tied]):
                if piece.numel():
                    yield from piece.split(SLOT_BYTES // part.itemsize)


def fragment_numbers(names: Sequence[str], num_fragments: int) -> dict[str, int]:
    """Which of the fragments each parameter is in: every ``num_fragments``-th block (2501.18512's strided pattern).

    A block is what a module list numbers: the outermost number in a name. What is in none is in the first fragment.

    Args:
        names: of all parameters of the whole model, in its order.

    Raises:
        ValueError: for more fragments than blocks.
    """
    if num_fragments == 1:
        return dict.fromkeys(names, 0)
    blocks: dict[str, int] = {}
    found = {}
    for name in names:
        block = _block_of(name)
        found[name] = 0 if block is None else blocks.setdefault(block, len(blocks)) % num_fragments
    if num_fragments > len(blocks):
        raise ValueError(
            f"parallel.strategy.fragments = {num_fragments}: a fragment is one block of the model or several, and this "
            f"model has {len(blocks)} (modules in a ModuleList or Sequential); use at most {max(1, len(blocks))}"
        )
    return found


def _block_of(name: str) -> str | None:
    parts = name.split(".")
    at = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return None if at is None else ".".join(parts[: at + 1])
