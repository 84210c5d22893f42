"""Tensors at servers in a user's own training loop, as in TorchMPI.

The servers are those of the launcher, or a thread in each rank.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from colossus.comm.objects import all_gather_object
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import current_context
from colossus.context.world import launched_ranks
from colossus.rows.row_gradient import RowGradient
from colossus.server.client import Servers
from colossus.server.process import has_servers, new_token, read_environment
from colossus.server.rpc_client import Handle, RpcClient
from colossus.server.rpc_server import RpcServer
from colossus.server.shard import RULES, check_optimizer
from colossus.server.sharding import Value
from colossus.server.store import ShardStore

_PREFIX = "own/"
_numbers = itertools.count(1)
#: number of rank 0's worker at servers that a strategy uses, too
_FIRST_WORKER = 1 << 20
#: longest wait for other ranks before this rank's server ends
_PATIENCE_SECONDS = 20.0


@dataclass
class _Joined:
    """The servers that this process uses.

    Attributes:
        process: id of the process that has joined; a fork of it has not.
        servers: the servers.
        own: the server that is a thread of this process, if there is one.
    """

    process: int
    servers: Servers
    own: RpcServer | None


_joined: _Joined | None = None


class ParameterServer:
    """A tensor at the servers, made by `init`.

    Attributes:
        name, shape, dtype: those of the tensor.
        device: device of the tensors that `receive` makes: that of the original tensor.
        servers: servers that store it.
        optimizer: optimizer of the rule ``gradient``, or None.
        is_freed: whether `free` was called.
    """

    def __init__(self, name: str, like: Tensor, servers: Servers, optimizer: Mapping[str, Any] | None) -> None:
        self.servers, self.optimizer = servers, optimizer
        self.name, self.shape, self.dtype, self.device = name, like.shape, like.dtype, like.device
        self.is_freed = False
        self._prefetched: Handle[Tensor] | None = None

    @property
    def key(self) -> str:
        """Its name at the servers."""
        if self.is_freed:
            raise ValueError(f"{self!r} was freed")
        return _PREFIX + self.name

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"ParameterServer({self.name!r}, {dtype} {list(self.shape)})"


def init(tensor: Tensor, name: str | None = None, *, optimizer: Mapping[str, Any] | None = None) -> ParameterServer:
    """Create a tensor at the servers, split over all of them by rows. Collective: all ranks call it, in the same order.

    Under `colossus launch` with servers it uses those. Elsewhere each rank, also a lone process, has a server as a
    thread until `close` or the end of the process.

    Args:
        tensor: a tensor of any dtype, shape and device. The values of rank 0 are stored.
        name: unique name; by default a number.
        optimizer: optimizer of the rule ``gradient``, for example dict(type="sgd", lr=0.1); momentum, adagrad,
            rowwise_adagrad and adam with their options (`colossus.rows.row_rules`).

    Raises:
        ValueError: if it is no such tensor, the name exists, or there is no such optimizer.
        Refused: if ranks differ in shape, dtype or order.
    """
    if not isinstance(tensor, Tensor):
        raise ValueError(f"colossus.server.init takes a tensor, not {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or hasattr(tensor, "to_local"):
        kind = type(tensor).__name__ if hasattr(tensor, "to_local") else f"{tensor.layout} on {tensor.device}"
        raise ValueError(f"colossus.server.init takes a dense tensor with values, not {kind}")
    servers = _servers_of_run()
    handle = ParameterServer(f"tensor-{next(_numbers)}" if name is None else name, tensor, servers, optimizer)
    servers.create({handle.key: tensor.detach().to("cpu")}, optimizer).wait()
    return handle


def send(
    handle: ParameterServer, tensor: Tensor | None, rule: str = "add", ids: Tensor | None = None, **options: Any
) -> Handle[int | None]:
    """Change the tensor at the servers. ``tensor`` may be changed as soon as this returns.

    Args:
        handle: the tensor at the servers.
        tensor: values of its shape, sparse or dense; with ``ids`` the rows, [n, ...]; None for ``zero``.
        rule: ``zero``, ``copy``, ``add``, or ``gradient``, an update by the optimizer.
        ids: [n], rows in any order; values for the same row are added.
        options: options of the optimizer for this update, such as ``lr``.

    Returns:
        A handle; its result is the staleness: the number of updates since this rank received the tensor, None if it
        never did, and for ``zero`` and ``copy``. Waiting is optional.

    Raises:
        ValueError: if the values do not fit the tensor, or its optimizer has no such options.
    """
    if rule not in RULES:
        raise ValueError(f"there is no rule {rule!r}; there are {', '.join(RULES)}")
    if rule == "gradient":
        if "lr" not in {**(handle.optimizer or {}), **options}:
            missing = "learning rate" if handle.optimizer else "optimizer"
            raise ValueError(f'{handle!r} has no {missing}: use init(.., optimizer=dict(type="sgd", lr=0.1))')
        named = {key: value for key, value in options.items() if key not in ("scale", "clip_value")}
        check_optimizer(handle.name, chosen := {**(handle.optimizer or {}), **named})
        if ids is not None and chosen.get("weight_decay"):
            raise ValueError(f"{handle!r} has weight_decay, which needs all rows in each update, but some were sent")
    elif options:
        raise ValueError(f"{rule} of {handle!r} takes no options, but got {', '.join(options)}")
    if tensor is None and rule != "zero":
        raise ValueError(f"{rule} of {handle!r} needs a tensor")
    value: Value = tensor if rule != "zero" else None
    if ids is not None:
        value = _rows(handle, ids, tensor, rule)
    key = handle.key
    return handle.servers.push({key: value}, rule, options).then(lambda staleness: staleness[key])


def receive(handle: ParameterServer, into: Tensor | None = None, ids: Tensor | None = None) -> Handle[Tensor]:
    """Start to receive the values at the servers, or take those that `prefetch` has received.

    The values of one shard are of one moment; shards may differ in it.

    Args:
        handle: the tensor at the servers.
        into: tensor that receives them, not to be used until the handle was waited for; None: a new tensor.
        ids: [n], rows in any order, to receive only these, [n, ...].

    Returns:
        A handle, whose result is the tensor.

    Raises:
        ValueError: ``into`` has another shape or dtype, or ids are no integers [n].
    """
    key, servers = handle.key, handle.servers
    if ids is None:
        _require_fits(handle, into, tuple(handle.shape))
        target = torch.empty(handle.shape, dtype=handle.dtype, device=handle.device) if into is None else into
        coming, handle._prefetched = handle._prefetched, None
        if coming is None:
            return servers.pull({key: target}).then(lambda _: target)

        @torch.no_grad()
        def copied(values: Tensor) -> Tensor:
            return target.copy_(values)

        return coming.then(copied)
    wanted, places = torch.unique(_checked_ids(handle, ids), return_inverse=True)
    shape = (len(ids), *handle.shape[1:])
    _require_fits(handle, into, shape)

    @torch.no_grad()
    def taken(rows: dict[str, Tensor]) -> Tensor:
        values = rows[key][places]
        return values.to(handle.device) if into is None else into.detach().copy_(values)

    return servers.pull_rows({key: wanted}).then(taken)


def _require_fits(handle: ParameterServer, into: Tensor | None, shape: tuple[int, ...]) -> None:
    if into is not None and (into.shape != shape or into.dtype != handle.dtype):
        raise ValueError(
            f"{handle!r}: {handle.dtype} {list(shape)} does not go into {into.dtype} {list(into.shape)} (into=)"
        )


def prefetch(handle: ParameterServer) -> Handle[Tensor]:
    """Start to receive the values into a buffer; the next `receive` without ids uses it."""
    if handle._prefetched is None:
        buffer = torch.empty(handle.shape, dtype=handle.dtype)
        handle._prefetched = handle.servers.pull({handle.key: buffer}).then(lambda _: buffer)
    return handle._prefetched


def free(handle: ParameterServer) -> None:
    """Free the tensor of this rank. It is deleted when all ranks have freed it."""
    handle.servers.free([handle.key]).wait()
    handle.is_freed = True


def _checked_ids(handle: ParameterServer, ids: Tensor) -> Tensor:
    if not handle.shape:
        raise ValueError(f"{handle!r} is a scalar, which has no rows")
    if ids.dim() != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"ids of rows of {handle!r} are integers [n], not {ids.dtype} {list(ids.shape)}")
    return ids.detach().to("cpu", torch.int64)


def _rows(handle: ParameterServer, ids: Tensor, rows: Tensor | None, rule: str) -> RowGradient:
    """Return rows by ascending, unique ids."""
    ids = _checked_ids(handle, ids)
    if rows is None:
        rows = torch.zeros((len(ids), *handle.shape[1:]), dtype=handle.dtype)
    if rows.shape != (len(ids), *handle.shape[1:]):
        raise ValueError(
            f"{len(ids)} rows of {handle!r} are {[len(ids), *handle.shape[1:]]}, the values are {list(rows.shape)}"
        )
    rows = rows.detach().to("cpu")
    wanted, places = torch.unique(ids, return_inverse=True)
    if len(wanted) < len(ids) and rule == "copy":
        raise ValueError(f"copy of rows of {handle!r}: a row is there twice")
    if len(wanted) == len(ids):
        return RowGradient(wanted, torch.empty_like(rows).index_copy_(0, places, rows))
    return RowGradient(wanted, rows.new_zeros((len(wanted), *rows.shape[1:])).index_add_(0, places, rows))


# -- the servers ----------------------------------------------------------------------------------------------


def _servers_of_run() -> Servers:
    """Return the servers, and join them at the first call: collective then, unless the launcher has started them.

    Raises:
        ValueError: if processes were started that are not joined.
    """
    global _joined
    if _joined is None or _joined.process != os.getpid():
        _joined = _join(_all_ranks())
        atexit.register(close)
    return _joined.servers


def close() -> None:
    """Leave the servers; all tensors are deleted. All ranks call it. It is called at the end of a process, too.

    A server that is a thread of this rank ends when the other ranks have left it.
    """
    global _joined
    joined, _joined = _joined, None
    if joined is None or joined.process != os.getpid():
        return
    atexit.unregister(close)
    joined.servers.close()
    if joined.own is not None:
        has_failed = sys.exception() is not None or hasattr(sys, "last_value")  # others may wait for this rank then
        joined.own.close(0.0 if has_failed else _PATIENCE_SECONDS)


def _join(group: AxisGroup) -> _Joined:
    own, first = None, 0
    if has_servers():
        first = _FIRST_WORKER
        endpoints, token = read_environment()
    else:
        token = all_gather_object(new_token(), group)[0]
        store = ShardStore()
        own = RpcServer(store.handle, token, index=group.index, on_gone=store.on_gone)
        endpoints = all_gather_object(own.endpoint, group)
    workers = [first + rank for rank in range(group.size)]
    clients = [RpcClient(endpoint, token, workers[group.index]) for endpoint in endpoints]
    return _Joined(os.getpid(), Servers(clients, workers[group.index], workers), own)


def _all_ranks() -> AxisGroup:
    context = current_context()
    if context.world_size > 1:
        return context.group(context.grid.names)
    started, rank = (os.environ.get(name, default) for name, default in (("WORLD_SIZE", "1"), ("RANK", "0")))
    if has_servers() and not dist.is_initialized() and started.isdecimal() and rank.isdecimal():
        return AxisGroup(("world",), tuple(range(int(started))), int(rank), None)  # no collective is needed
    return launched_ranks("colossus.server")
