"""A process group over one axis or a tuple of axes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeGuard

from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d


@dataclass(eq=False)
class AxisGroup:
    """The ranks that differ from this one only along ``axes``.

    Nobody changes one but `ParallelContext.leave_out`, after a death: whoever holds it has the living then.

    Attributes:
        axes: atomic axes, outermost first; they order the ranks of the group.
        ranks: global ranks in group order.
        index: position of this rank in ``ranks``.
        process_group: None when the group has one rank; collectives over it are then the identity.
        is_on_host: its ranks exchange tensors of the host alone (gloo); see `comm.host_staging`.
    """

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    index: int
    process_group: dist.ProcessGroup | None
    is_on_host: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_on_host = self.process_group is not None and dist.get_backend(self.process_group) == dist.Backend.GLOO

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def name(self) -> str:
        """The c10d name, which the functional collectives take."""
        assert self.process_group is not None
        return self.process_group.group_name

    def __deepcopy__(self, memo: dict[int, object]) -> AxisGroup:
        return self

    def __str__(self) -> str:
        return "x".join(self.axes) if self.axes else "self"


#: by address and port of the launcher: its store, and numbers for the worlds made from it
_stores: dict[tuple[str | None, str | None], tuple[dist.Store, Iterator[int]]] = {}


def fresh_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The launcher's store under a prefix that no earlier world of this process has written to.

    Without it a world made after another reads the addresses of the destroyed one ("Connection refused").
    """
    master = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if master not in _stores:
        store, _, _ = next(iter(dist.rendezvous("env://", rank, world_size, timeout=timeout)))
        _stores[master] = store, itertools.count()
    store, worlds = _stores[master]
    return dist.PrefixStore(f"colossus/world{next(worlds)}", store)


def agree_on_context(rank: int, axes: str, timeout: timedelta) -> int:
    """How many contexts the ranks of this world have made, this one included: the same on all of them.

    Their groups and values are named by it. A count of this process would depend on what else it has made.

    Args:
        axes: of the new context, in words.

    Raises:
        ValueError: when rank 0 makes another context, or none.
    """
    assert dist.group.WORLD is not None
    store = store_of(dist.group.WORLD)
    number = store.add(f"contexts/{rank}", 1)
    key = f"context{number}/axes"
    if rank == 0:
        store.set(key, axes)
        return number
    mine = f"rank {rank} makes its context {number} with axes {axes}"
    try:
        store.wait([key], timeout)
    except RuntimeError as error:
        raise ValueError(
            f"{mine}, but rank 0 has not made one within {timeout.total_seconds():g} s: all ranks make the same "
            f"contexts in the same order, also where only some of them use one"
        ) from error
    theirs = store.get(key).decode()
    if theirs != axes:
        raise ValueError(f"{mine}, but rank 0 made its with {theirs}: all ranks make the same contexts")
    return number


def new_process_group(ranks: Sequence[int], index: int, name: str, timeout: timedelta) -> dist.ProcessGroup:
    """A process group whose members are in the order of ``ranks``. All of them must call, and nobody else.

    ``dist.new_group`` names a group by how many this process made before. Ranks that made other numbers of groups would
    then wait for each other for ever, and a group made again would read the addresses of the one destroyed before.

    Args:
        ranks: global ranks.
        index: of this process among them.
        name: the same on all of them, and never used before in this world.
    """
    world = dist.group.WORLD
    assert world is not None
    backend, store = c10d._world.pg_map[world]
    group, _ = c10d._new_process_group_helper(
        len(ranks), index, list(ranks), backend, store, c10d.GroupName(name), timeout=timeout, group_desc=name
    )
    assert isinstance(group, dist.ProcessGroup)
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


def choose_backend(wanted: str, device_type: str) -> str:
    """What joins ranks that compute on ``device_type``.

    Args:
        wanted: ``comm.backend``.

    Raises:
        ValueError: nccl is asked for, and there is no CUDA device.
    """
    if wanted == "nccl" and device_type != "cuda":
        raise ValueError(
            f"comm.backend = 'nccl' joins CUDA devices, but ranks compute on {device_type} here; use 'auto' or 'gloo'"
        )
    return ("nccl" if device_type == "cuda" else "gloo") if wanted == "auto" else wanted


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """The store that a process group was made from."""
    return c10d._world.pg_map[group][1]


def is_fake(group: dist.ProcessGroup | None) -> TypeGuard[dist.ProcessGroup]:
    """Whether torch's fake backend stands for the other ranks: nothing comes from them, and nobody waits for them."""
    return group is not None and dist.get_backend(group) == dist.Backend.FAKE


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Let collectives of this group fail after ``timeout``. Backends without time-outs (fake) are left alone."""
    if dist.get_backend(group) in (dist.Backend.GLOO, dist.Backend.NCCL):
        c10d._set_pg_timeout(timeout, group)
