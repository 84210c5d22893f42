"""What of a replica's parameters is at the servers under which name, which rank pushes it, and how it comes back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.comm.objects import all_gather_object
from colossus.context.parallel_context import ParallelContext
from colossus.gradients.host_transfer import HostRead
from colossus.gradients.reduction import ModelParts
from colossus.layout.layout import Box
from colossus.layout.parameter import logical_parameters, spec_of
from colossus.layout.split_parameter import as_shards
from colossus.rows.row_gradient import RowGradient
from colossus.server.rpc_client import Handle
from colossus.sparse.table import TableSync
from colossus.sparse.tables import Tables

#: of one shard: its gradient, whole or of some rows
Gradient = Tensor | RowGradient | None


@dataclass(frozen=True)
class ServerShard:
    """A box of a logical parameter: one tensor at the servers, which the ranks that hold this box have in common.

    Attributes:
        name: at the servers.
        param: as this rank stores it.
        rows: of it, (start, stop); None: all.
        is_first: whether this rank is the first of its replica to hold the box: it pushes what becomes of it.
        is_shared: whether other ranks of the replica hold it, too.
    """

    name: str
    param: nn.Parameter
    rows: tuple[int, int] | None
    is_first: bool
    is_shared: bool

    def local(self, buffer: Tensor | None = None) -> Tensor:
        """The values of the box: a view of the parameter, or of a tensor of its shape."""
        with as_shards():
            source = self.param.detach() if buffer is None else buffer
            return source if self.rows is None else source[self.rows[0] : self.rows[1]]

    def start_gradient(self) -> Callable[[], Gradient]:
        """Let the gradient of the box travel to the host: what waits for it. None where there is none."""
        gradient = self.param.grad
        if gradient is None:
            return lambda: None
        if gradient.is_sparse:
            ids, rows = HostRead(gradient._indices()[0]), HostRead(gradient._values())
            return lambda: RowGradient(ids.wait(), rows.wait())
        return HostRead(self.local(gradient)).wait

    def host_memory(self) -> Tensor:
        """For values of the box on the host; page-locked where they go on to a device."""
        local = self.local()
        return torch.empty_like(local, device="cpu", pin_memory=local.device.type != "cpu")


def gradients_of(shards: Sequence[ServerShard]) -> dict[str, Gradient]:
    """On the host, by name. All are on their way before the first is waited for."""
    coming = {shard.name: shard.start_gradient() for shard in shards}
    return {name: wait() for name, wait in coming.items()}


@dataclass(frozen=True)
class ShardSize:
    """Of a tensor at the servers, the same on all ranks."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def server_shards(parts: ModelParts, params: Sequence[nn.Parameter]) -> tuple[list[ServerShard], list[ShardSize]]:
    """Those of this rank, in the order of the model, and all of its replica by name. Collective in a replica.

    Args:
        params: stored parameters that are trained.
    """
    context, trained = parts.context, {id(param) for param in params}
    sizes, at, replica = context.grid.sizes, context.coordinates, context.group(context.replica_axes)
    found = []
    for logical in logical_parameters(parts.model):
        if id(logical.parameter) in trained and logical.parameter.numel():
            # the name of the parameter is that of the whole model, also where a stage holds a tied one by another
            name = "/".join(filter(None, (spec_of(logical.parameter).name, logical.shard_name)))
            box = logical.layout.box(logical.shape, sizes, at)
            found.append((f"{name}{_suffix(box, logical.shape)}", logical))
    with as_shards():
        shapes = {name: tuple(logical.local().shape) for name, logical in found}
    own = [ShardSize(name, shapes[name], logical.parameter.dtype) for name, logical in found]
    held = all_gather_object(own, replica)
    holders: dict[str, list[int]] = {}
    for index, of_rank in enumerate(held):
        for each in of_rank:
            holders.setdefault(each.name, []).append(index)
    shards = [
        ServerShard(name, logical.parameter, logical.rows, holders[name][0] == replica.index, len(holders[name]) > 1)
        for name, logical in found
        if 0 not in shapes[name]
    ]
    union = {each.name: each for of_rank in held for each in of_rank if 0 not in each.shape}
    return shards, [union[name] for name in sorted(union)]


def _suffix(box: Box, shape: tuple[int, ...]) -> str:
    """What tells a box from others of the same parameter: its spans, where it is not all of it."""
    if all((start, stop) == (0, size) for (start, stop), size in zip(box, shape, strict=True)):
        return ""
    return "[" + ",".join(f"{start}:{stop}" for start, stop in box) + "]"


class SharedShards:
    """The boxes that several ranks of a replica hold: what the first of them has pulled is what all take.

    A parameter that is whole on several ranks must be the same on all of them, but each would see the servers at
    another moment.

    Args:
        shards: of this rank.
        sizes: of all shards of the replica.
    """

    def __init__(self, parts: ModelParts, shards: Sequence[ServerShard], sizes: Sequence[ShardSize]) -> None:
        context = parts.context
        self._group = context.group(context.replica_axes)
        self._device = context.device
        shared = {shard.name for shard in shards if shard.is_shared}
        names = {name for each in all_gather_object(sorted(shared), self._group) for name in each}
        self._sizes = [size for size in sizes if size.name in names]

    def __bool__(self) -> bool:
        return bool(self._sizes)

    def take_first(self, shards: Sequence[ServerShard], values: Sequence[Tensor]) -> None:
        """Let ``values`` of shared shards be those of the first holder, in place. Collective in a replica."""
        by_name = {shard.name: (shard, value) for shard, value in zip(shards, values, strict=True)}
        for dtype in dict.fromkeys(size.dtype for size in self._sizes):
            sizes = [size for size in self._sizes if size.dtype == dtype]
            counts = [torch.Size(size.shape).numel() for size in sizes]
            flat = torch.zeros(sum(counts), dtype=dtype, device=self._device)
            pieces = flat.split(counts)
            for size, piece in zip(sizes, pieces, strict=True):
                shard, value = by_name.get(size.name, (None, None))
                if shard is not None and shard.is_first and value is not None:
                    piece.copy_(value.reshape(-1))
            flat = collectives.all_reduce(flat, self._group, owned=True).wait()
            for size, piece in zip(sizes, flat.split(counts), strict=True):
                shard, value = by_name.get(size.name, (None, None))
                if shard is not None and value is not None:
                    value.copy_(piece.view(value.shape))


class Pull:
    """Values of shards on their way to a rank.

    Args:
        values: where they come to: of the shards that this rank is the first of its replica to hold.
        waited: is told the seconds for which they were waited for.
    """

    def __init__(
        self,
        handle: Handle[None],
        shards: Sequence[ServerShard],
        values: Sequence[Tensor],
        shared: SharedShards,
        waited: Callable[[float], None],
    ) -> None:
        self._handle, self._shards, self._values = handle, shards, list(values)
        self._shared, self._waited = shared, waited

    def own(self) -> list[tuple[ServerShard, Tensor]]:
        """The shards with what this rank has pulled itself; not collective."""
        began = time.perf_counter()
        self._handle.wait()
        self._waited(time.perf_counter() - began)
        return list(zip(self._shards, self._values, strict=True))

    def wait(self) -> list[tuple[ServerShard, Tensor]]:
        """The shards with their values. Collective in a replica of several ranks."""
        found = self.own()
        if self._shared:
            self._shared.take_first(self._shards, self._values)
        return found

    @torch.no_grad()
    def wait_into_parameters(self) -> None:
        """The parameters of this rank are these values. Collective in a replica of several ranks."""
        for shard, value in self.wait():
            local = shard.local()
            if value.data_ptr() != local.data_ptr():
                local.copy_(value, non_blocking=True)  # nobody writes to it any more


class ServerRows(TableSync):
    """A table that this rank shares with no other of its replica.

    What is here of it is as old as the last pull of each row, until the whole table is pulled.

    Args:
        pull: the rows of ascending distinct ids, from the servers.
    """

    def __init__(self, param: nn.Parameter, num_rows: int, pull: Callable[[Tensor], Tensor]) -> None:
        super().__init__(param, num_rows)
        self._pull = pull
        #: [rows] those that this step has pulled; None outside of steps, when what is here is looked up
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
    """The tables of a rank's part of a model, whose gradients are summed inside of the replica; None: it has none."""
    tables = Tables(model, context, lambda name, shape, ranks: "gather", context.replica_axes)
    return tables if tables else None
