"""The shards of a replica's parameters at the servers: their names, the ranks that push them, and their pulls."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.comm.flat_buffer import FlatBuffer
from colossus.comm.host_transfer import HostRead
from colossus.comm.objects import all_gather_object
from colossus.context.parallel_context import ParallelContext
from colossus.gradients.reduction import ModelParts
from colossus.layout.layout import Box
from colossus.layout.parameter import logical_parameters, spec_of
from colossus.layout.split_parameter import as_shards
from colossus.rows.row_gradient import RowGradient
from colossus.server.rpc_client import Handle
from colossus.sparse.table import TableSync
from colossus.sparse.tables import Tables

#: the gradient of a shard: of all rows, of some, or none
Gradient = Tensor | RowGradient | None


@dataclass(frozen=True)
class ServerShard:
    """A box of a logical parameter, which is one tensor at the servers for all ranks that have this box.

    Attributes:
        name: the tensor's name at the servers.
        param: the parameter, as this rank stores it.
        rows: its rows (start, stop) that are the box; None: all.
        is_first: whether this rank is the first of its replica that has the box, and so pushes it.
        is_shared: whether other ranks of the replica have the box, too.
    """

    name: str
    param: nn.Parameter
    rows: tuple[int, int] | None
    is_first: bool
    is_shared: bool

    def local(self, buffer: Tensor | None = None) -> Tensor:
        """Return the values of the box, a view of the parameter or of a tensor of its shape."""
        with as_shards():
            source = self.param.detach() if buffer is None else buffer
            return source if self.rows is None else source[self.rows[0] : self.rows[1]]

    def start_gradient(self) -> Callable[[], Gradient]:
        """Start to copy the gradient of the box to the host.

        Returns:
            A function that waits for it, and returns it; None where there is no gradient.
        """
        gradient = self.param.grad
        if gradient is None:
            return lambda: None
        if gradient.is_sparse:
            ids, rows = HostRead(gradient._indices()[0]), HostRead(gradient._values())
            return lambda: RowGradient(ids.wait(), rows.wait())
        return HostRead(self.local(gradient)).wait

    def host_memory(self) -> Tensor:
        """Return host memory for the values of the box; page-locked where they are copied to a device."""
        local = self.local()
        return torch.empty_like(local, device="cpu", pin_memory=local.device.type != "cpu")


def gradients_of(shards: Sequence[ServerShard]) -> dict[str, Gradient]:
    """Return the gradients of shards by name, on the host; all copies are started before the first wait."""
    waits = {shard.name: shard.start_gradient() for shard in shards}
    return {name: wait() for name, wait in waits.items()}


@dataclass(frozen=True)
class ShardSize:
    """The name, shape and dtype of a tensor at the servers, the same on all ranks."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def server_shards(parts: ModelParts, params: Sequence[nn.Parameter]) -> tuple[list[ServerShard], list[ShardSize]]:
    """Return the shards of this rank, in the order of the model, and the sizes of all shards of its replica, by name.

    Collective in a replica.

    Args:
        parts: the model of this rank.
        params: the stored parameters that are trained.
    """
    context, trained = parts.context, {id(param) for param in params}
    sizes, coordinates, replica = context.grid.sizes, context.coordinates, context.group(context.replica_axes)
    named = []
    for logical in logical_parameters(parts.model):
        if id(logical.parameter) in trained and logical.parameter.numel():
            # the name in the whole model, also where a stage has a tied parameter under another name
            name = "/".join(filter(None, (spec_of(logical.parameter).name, logical.shard_name)))
            box = logical.layout.box(logical.shape, sizes, coordinates)
            named.append((f"{name}{_suffix(box, logical.shape)}", logical))
    with as_shards():
        shapes = {name: tuple(logical.local().shape) for name, logical in named}
    own = [ShardSize(name, shapes[name], logical.parameter.dtype) for name, logical in named]
    by_rank = all_gather_object(own, replica)
    holders: dict[str, list[int]] = {}
    for index, of_rank in enumerate(by_rank):
        for size in of_rank:
            holders.setdefault(size.name, []).append(index)
    shards = [
        ServerShard(name, logical.parameter, logical.rows, holders[name][0] == replica.index, len(holders[name]) > 1)
        for name, logical in named
        if 0 not in shapes[name]
    ]
    union = {size.name: size for of_rank in by_rank for size in of_rank if 0 not in size.shape}
    return shards, [union[name] for name in sorted(union)]


def _suffix(box: Box, shape: tuple[int, ...]) -> str:
    """Return the suffix of a box's name: its spans, or nothing where it is the whole parameter."""
    if all((start, stop) == (0, size) for (start, stop), size in zip(box, shape, strict=True)):
        return ""
    return "[" + ",".join(f"{start}:{stop}" for start, stop in box) + "]"


class SharedShards:
    """The boxes that several ranks of a replica have, whose first rank pulls them for all.

    The ranks must have the same values, but each would see the servers at another moment.

    Args:
        parts: the model of this rank.
        shards: the shards of this rank.
        sizes: the sizes of all shards of the replica.
    """

    def __init__(self, parts: ModelParts, shards: Sequence[ServerShard], sizes: Sequence[ShardSize]) -> None:
        context = parts.context
        self._group = context.group(context.replica_axes)
        self._device = context.device
        shared = {shard.name for shard in shards if shard.is_shared}
        names = {name for of_rank in all_gather_object(sorted(shared), self._group) for name in of_rank}
        self._names = [size.name for size in sizes if size.name in names]
        self._flat = FlatBuffer((size.dtype, torch.Size(size.shape)) for size in sizes if size.name in names)

    def __bool__(self) -> bool:
        return bool(self._names)

    def take_first(self, shards: Sequence[ServerShard], values: Sequence[Tensor]) -> None:
        """Overwrite ``values`` of shared shards with those of their first rank. Collective in a replica."""
        buffer = torch.zeros(self._flat.nbytes, dtype=torch.uint8, device=self._device)
        views = dict(zip(self._names, self._flat.views(buffer), strict=True))
        shared = [(shard, value) for shard, value in zip(shards, values, strict=True) if shard.name in views]
        for shard, value in shared:
            if shard.is_first:
                views[shard.name].copy_(value)
        for part in self._flat.parts(buffer):
            if (total := collectives.all_reduce(part, self._group, owned=True).wait()) is not part:
                part.copy_(total)
        for shard, value in shared:
            value.copy_(views[shard.name])


class Pull:
    """A pull of shards' values that is under way.

    Args:
        handle: the call to the servers.
        shards: the shards.
        values: the memory for their values; the call fills that of shards whose first rank is this one.
        shared: the boxes that several ranks of the replica have.
        count_wait: called with the seconds of each wait.
    """

    def __init__(
        self,
        handle: Handle[None],
        shards: Sequence[ServerShard],
        values: Sequence[Tensor],
        shared: SharedShards,
        count_wait: Callable[[float], None],
    ) -> None:
        self._handle, self._shards, self._values = handle, shards, list(values)
        self._shared, self._count_wait = shared, count_wait

    def own(self) -> list[tuple[ServerShard, Tensor]]:
        """Wait for this rank's own pull, and return the shards with their values; not collective."""
        began = time.perf_counter()
        self._handle.wait()
        self._count_wait(time.perf_counter() - began)
        return list(zip(self._shards, self._values, strict=True))

    def wait(self) -> list[tuple[ServerShard, Tensor]]:
        """Wait for the pull, and return the shards with their values. Collective in a replica of several ranks."""
        pairs = self.own()
        if self._shared:
            self._shared.take_first(self._shards, self._values)
        return pairs

    @torch.no_grad()
    def wait_into_parameters(self) -> None:
        """Wait for the pull, and set this rank's parameters. Collective in a replica of several ranks."""
        for shard, value in self.wait():
            local = shard.local()
            if value.data_ptr() != local.data_ptr():
                local.copy_(value, non_blocking=True)  # the source does not change any more


class ServerRows(TableSync):
    """A table at the servers that no other rank of the replica shares, and that steps pull by rows.

    This rank's copy of a row is as old as its last pull, until the whole table is pulled.

    Args:
        param: this rank's copy of the table.
        num_rows: its rows.
        pull: a function that returns the servers' rows of ascending distinct ids.
    """

    def __init__(self, param: nn.Parameter, num_rows: int, pull: Callable[[Tensor], Tensor]) -> None:
        super().__init__(param, num_rows)
        self._pull = pull
        #: [rows], whether this step has pulled a row; None outside of steps, which look up in the copy
        self._is_new: Tensor | None = None

    def begin(self) -> None:
        self._is_new = torch.zeros(len(self.param), dtype=torch.bool, device=self.param.device)

    def end(self) -> None:
        self._is_new = None

    def fetch(self, ids: Tensor) -> Tensor:
        if self._is_new is not None:
            wanted = ids[~self._is_new[ids]]
            if len(wanted):
                self.param.detach()[wanted] = self._pull(wanted).to(self.param.device)
                self._is_new[wanted] = True
        return super().fetch(ids)


def tables_of_replica(model: nn.Module, context: ParallelContext) -> Tables | None:
    """Return the tables of a rank's part of a model, or None; their gradients are summed inside the replica."""
    tables = Tables(model, context, lambda name, shape, ranks: "gather", context.replica_axes)
    return tables if tables else None
