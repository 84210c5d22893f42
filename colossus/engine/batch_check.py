"""A mark of each step's batch: ranks of one model that were given different batches are told so.

Tensor, sequence and pipeline ranks share a batch. A loop that gives each process its own (a `DistributedSampler` over
the world) would train on in silence: shapes fit, loss and norm are finite and the same on all ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from colossus.comm.objects import all_gather_object
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext
from colossus.engine.late_value import LateValue
from colossus.nest import tensors
from colossus.random import hash_key

#: values of each tensor that are looked at
_SAMPLES = 256
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class BatchCheck:
    """Adds a mark of the batch to the step's all-reduce, and tells what its total means.

    With h a hash of the batch and n ranks that share it, the first of them adds (n - 1) h and the others -h, so that
    the total is 0 when they agree. The hash is of the replica's number too, so that errors of two replicas do not
    cancel. The numbers are integers that float64 holds exactly in any order of summation.

    Args:
        group: all ranks that share a batch, and maybe other replicas: that of the step's all-reduce.
    """

    def __init__(self, context: ParallelContext, group: AxisGroup) -> None:
        self._context, self._group = context, group
        self._num_sharing = context.world_size // context.size("data")
        shared = tuple(axis for axis in context.grid.names if axis not in context.grid.axes("data"))
        self._is_first = context.index(shared) == 0
        self._mask = (1 << min(40, 52 - context.world_size.bit_length())) - 1
        #: whoever observes the stages compares batches itself, and says better where they differ
        self.is_silent = False
        self._late_total = LateValue()

    @property
    def is_needed(self) -> bool:
        return self._num_sharing > 1

    def mark(self, batch: Any, of_cpu: int) -> Tensor:
        """What this rank adds to the total: float64 scalar. Never waits for an accelerator.

        Args:
            of_cpu: `fingerprint` of the batch; values of tensors on other devices are added there.
        """
        replica, device = self._context.index("data"), self._context.device
        value = torch.full((), hash_key("batch", replica, of_cpu), dtype=torch.int64, device=device)
        for _, values in _samples(batch):
            if values.device.type != "cpu":
                weights = _weights(replica, len(values), values.device)
                value = value * 31 + (values.to(torch.int64) * weights).sum().to(device)
        factor = self._num_sharing - 1 if self._is_first else -1
        return (value & self._mask).double() * factor

    def check(self, total: Tensor, own: Tensor) -> None:
        """Check the total of a step: at once where that costs nothing, on an accelerator with the next step.

        Args:
            own: what `mark` gave.

        Raises:
            ValueError: on all ranks, when ranks of one model were given different batches.
        """
        if total.device.type == "cpu":
            if total.item():
                factor = self._num_sharing - 1 if self._is_first else -1
                refusal = self._refusal(all_gather_object(own.item() / factor, self._group))
                if not self.is_silent:
                    raise ValueError(refusal)
            return
        late = self._late_total.push(total)
        if late is not None:
            self.require_zero(late)

    def require_zero(self, total: float) -> None:
        """The same for a total that has been read.

        Raises:
            ValueError: see `check`.
        """
        if total and not self.is_silent:
            raise ValueError(self._refusal(None))

    def _refusal(self, hashes: list[float] | None) -> str:
        grid, data = self._context.grid, self._context.grid.axes("data")
        shared = tuple(axis for axis in grid.names if axis not in data and grid.sizes[axis] > 1)
        where = ""
        if hashes is not None:
            by_rank = dict(zip(self._group.ranks, hashes, strict=True))
            replicas = {tuple(grid.group(rank, shared)) for rank in self._group.ranks}
            wrong = sorted(ranks for ranks in replicas if len({by_rank[rank] for rank in ranks}) > 1)
            where = f" ({'; '.join('ranks ' + ', '.join(map(str, ranks)) for ranks in wrong[:4])})"
        sizes = " x ".join(f"{axis} {grid.sizes[axis]}" for axis in shared)
        return (
            f"ranks that share a batch were given different ones{where}: under this plan every {self._num_sharing} "
            f"ranks ({sizes}) work on the same samples, and only data ranks have samples of their own. Take batches "
            f"from engine.loader; a sampler of your own gets num_replicas=engine.context.size('data') and "
            f"rank=engine.context.index('data') instead of the world size and the rank, and augments with random "
            f"numbers that depend on these alone"
        )


def fingerprint(batch: Any) -> int:
    """A number that two different batches hardly share: of all shapes, and of some values of tensors on the CPU."""
    found = zlib.crc32(repr([tuple(x.shape) for _, x in tensors(batch)]).encode())
    for _, values in _samples(batch):
        if values.device.type == "cpu":
            found = zlib.crc32(values.numpy().tobytes(), found)
    return found


def _samples(batch: Any) -> Iterator[tuple[str, Tensor]]:
    """Some values of every tensor with its path, as integers with the same bits."""
    for path, x in tensors(batch):
        if x.layout is not torch.strided or x.is_quantized or x.is_meta or not x.numel():
            continue
        x = x.detach()
        if x.is_complex():
            x = torch.view_as_real(x.resolve_conj())
        yield path, torch.take(x.resolve_neg().view(_INTEGERS[x.element_size()]), _positions(x.numel(), x.device))


@lru_cache(maxsize=256)
def _positions(numel: int, device: torch.device) -> Tensor:
    """Which elements are looked at: scattered, so that they are not all first tokens or corners of images."""
    if numel <= _SAMPLES:
        return torch.arange(numel, device=device)
    return torch.randint(numel, (_SAMPLES,), generator=torch.Generator().manual_seed(numel)).sort().values.to(device)


@lru_cache(maxsize=256)
def _weights(replica: int, count: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(replica)
    return torch.randint(2**62, (count,), generator=generator).to(device) | 1
