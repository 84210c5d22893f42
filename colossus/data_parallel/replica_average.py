"""The average of replicas that have parameters of their own, and their distance from it."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from colossus.checkpoint.tensor_file import host_bytes
from colossus.comm import collectives
from colossus.comm.flat_buffer import chunks, split_as
from colossus.comm.objects import all_gather_object
from colossus.context.precision import LOW
from colossus.data_parallel.parameter_vector import ParameterVector
from colossus.gradients.reduction import ModelParts
from colossus.layout.parameter import spec_of
from colossus.layout.split_parameter import as_shards

#: (tensors, weight), as `Strategy.average_addend` returns them
Share = tuple[Sequence[Tensor], float]


@dataclass(frozen=True)
class Distance:
    """The distance of the replicas' parameters z_i from their average.

    Attributes:
        absolute: the root of the mean over replicas of ||z_i - average||^2.
        norm: the norm of the average.
    """

    absolute: float
    norm: float

    @property
    def relative(self) -> float:
        return self.absolute / self.norm if self.norm else 0.0


class ReplicaAverage:
    """The average over replicas of the parameters and buffers that differ between them.

    It takes the memory of one chunk of ``bucket_mb`` (or of the largest parameter) beside that of
    `Strategy.average_addend`.

    Args:
        parts: the model of this rank.
        params: the stored parameters that differ between replicas, in the same order on all ranks along data.
    """

    def __init__(self, parts: ModelParts, params: Sequence[nn.Parameter]) -> None:
        self._parts, self._params = parts, list(params)
        self._group = parts.context.group("data")
        self._vector = ParameterVector(self._params)
        elsewhere = {id(param) for param in parts.counted_elsewhere}
        #: for each parameter, indices of the rows that this rank counts: it is the first of its replica to store them
        self._counted = [[] if id(param) in elsewhere else self._counted_rows(param) for param in self._params]

    def _counted_rows(self, param: nn.Parameter) -> list[Any]:
        context = self._parts.context
        axes = [axis for axis in context.replica_axes if axis not in context.grid.axes("pipeline")]
        spec = spec_of(param)
        if not spec.layout.owns(context.coordinates, axes):
            return []
        return [slice(*shard.rows) if param.dim() else ... for shard in spec.shards]

    @torch.no_grad()
    def parameters(self, share: Share) -> Iterator[tuple[int, Tensor]]:
        """Yield the average of each parameter, with its number: the sum of the shares over the sum of their weights.

        An average has the parameter's shape, and its dtype or a wider one, and is valid until the next. Collective
        over data, until the iterator ends.
        """
        tensors, weight = share
        weights = torch.tensor([weight], dtype=torch.float64, device=self._parts.context.device)
        total = collectives.all_reduce(weights, self._group, owned=True).wait().item()
        for numbers in self._chunks(tensors):
            # low precision would lose the differences
            wide = torch.float32 if tensors[numbers[0]].dtype in LOW else tensors[numbers[0]].dtype
            flat = torch.cat([tensors[number].reshape(-1).to(wide) for number in numbers])
            flat = collectives.all_reduce(flat, self._group, owned=True).wait().div_(total)
            yield from zip(numbers, split_as(flat, [tensors[number] for number in numbers]), strict=True)

    def _chunks(self, tensors: Sequence[Tensor]) -> Iterator[list[int]]:
        """Yield the numbers of tensors that travel together: of one dtype and device, as many as fit in a bucket."""
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for number, tensor in enumerate(tensors):
            kinds.setdefault((tensor.dtype, tensor.device), []).append(number)
        for numbers in kinds.values():
            yield from chunks(numbers, lambda number: tensors[number].nbytes, self._parts.bucket_mb * 2**20)

    @torch.no_grad()
    def buffers(self) -> list[tuple[Tensor, Tensor]]:
        """Return the floating-point buffers that differ between replicas (running statistics), each with its mean.

        Collective over data, where the model has floating-point buffers.
        """
        mine = [buffer for buffer in self._parts.model.buffers() if buffer.is_floating_point() and buffer.numel()]
        if not mine:
            return []
        of_replicas = all_gather_object([zlib.crc32(host_bytes(buffer)) for buffer in mine], self._group)
        means = []
        for buffer, checksums in zip(mine, zip(*of_replicas, strict=True), strict=True):
            if len(set(checksums)) > 1:
                wide = torch.float32 if buffer.dtype in LOW else buffer.dtype
                total = collectives.all_reduce(buffer.to(wide, copy=True), self._group, owned=True).wait()
                means.append((buffer, total / self._group.size))
        return means

    @torch.no_grad()
    def distance(self, averages: Iterable[tuple[int, Tensor]]) -> Distance:
        """Return the distance of the parameters from these averages. Collective over all ranks.

        Args:
            averages: numbers of parameters and their averages, as from `parameters`.
        """
        context = self._parts.context
        squares = torch.zeros(2, dtype=torch.float64, device=context.device)
        for number, mean in averages:
            own = self._params[number].detach()
            for rows in self._counted[number]:
                gap = torch.linalg.vector_norm(own[rows].to(mean.dtype) - mean[rows], dtype=torch.float64)
                squares += torch.stack([gap, torch.linalg.vector_norm(mean[rows], dtype=torch.float64)]).square()
        world = context.group(context.grid.names)
        total = collectives.all_reduce(squares, world, owned=True).wait() / self._group.size
        return Distance(*total.sqrt().tolist())

    @contextmanager
    def in_place(self, share: Share) -> Iterator[Distance]:
        """Set parameters and buffers to the average inside, and give their distance from it.

        Afterwards they are the replica's own again, bit for bit, also after an exception. Entering is collective over
        all ranks, leaving is not. Inside it takes the memory of the replica's own parameters beside the average.
        """
        own_parameters, buffers = self._vector.empty(), []
        with as_shards():
            self._vector.pack(own_parameters)
        try:
            with as_shards():
                means = self.buffers()
                buffers = [(buffer, buffer.clone()) for buffer, _ in means]
                distance = self.distance(self._write(self.parameters(share)))
                for buffer, mean in means:
                    buffer.copy_(mean)
            torch.clear_autocast_cache()
            yield distance
        finally:
            with as_shards():
                self._vector.unpack(own_parameters)
                for buffer, own in buffers:
                    buffer.copy_(own)
            torch.clear_autocast_cache()

    def _write(self, averages: Iterable[tuple[int, Tensor]]) -> Iterator[tuple[int, Tensor]]:
        """Yield the averages, and write each to its parameter when the next is asked for."""
        for number, mean in averages:
            yield number, mean
            self._params[number].detach().copy_(mean)
