"""A process group over one axis or a tuple of axes."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from colossus.context.program import Program

_numbers = itertools.count()
_by_key: weakref.WeakValueDictionary[str, AxisGroup] = weakref.WeakValueDictionary()


class Connection(Protocol):
    """A connection between the ranks of a group, such as a channel or links."""

    def close(self) -> None: ...


T = TypeVar("T", bound="Connection | None")


@dataclass(eq=False)
class AxisGroup:
    """The ranks that differ from this one only along ``axes``.

    Attributes:
        axes: atomic axes, outermost first; they order the ranks of the group.
        ranks: global ranks in group order.
        index: position of this rank in ``ranks``.
        process_group: None when the group has one rank; collectives over it are then the identity.
        is_on_host: its ranks exchange only tensors of the host (gloo); see `comm.host_staging`.
        is_fake: its other ranks are pretended: nothing travels between them, and they answer as this one.
        sums_in_tree: its sums are by `colossus.comm.tree_sum`, in the order of the ranks.
        program: the record of the parameters that its collectives moved.
        key: a text that only this object has in this process: see `group_of`.
    """

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    index: int
    process_group: dist.ProcessGroup | None
    is_on_host: bool = field(init=False)
    is_fake: bool = field(init=False)
    sums_in_tree: bool = field(init=False, default=False)
    program: Program = field(init=False, default_factory=Program, repr=False)
    key: str = field(init=False)
    _opened: dict[Hashable, Any] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        backend = None if self.process_group is None else dist.get_backend(self.process_group)
        self.is_on_host, self.is_fake = backend == dist.Backend.GLOO, backend == dist.Backend.FAKE
        self.key = f"{self}/{next(_numbers)}"
        _by_key[self.key] = self

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def name(self) -> str:
        """The c10d name, which the functional collectives take."""
        assert self.process_group is not None
        return self.process_group.group_name

    def opened(self, kind: Hashable, make: Callable[[], T]) -> T:
        """Return the group's connection of this kind, made at the first call, in which all of its ranks take part.

        It belongs to the group and is closed with it. A None, where none can be made, is remembered, too.
        """
        if kind not in self._opened:
            self._opened[kind] = make()
        connection: T = self._opened[kind]
        return connection

    def close(self) -> None:
        """Close the group's connections, and release the process group, whose maker destroys it.

        A process group keeps its threads and sockets as long as anything refers to it. Using it is an error from here
        on.
        """
        for connection in self._opened.values():
            if connection is not None:
                connection.close()
        self._opened.clear()
        if self.size > 1:
            del self.process_group  # torch would take None as all ranks

    def __getattr__(self, name: str) -> Any:
        if name == "process_group":
            raise RuntimeError(f"the group of ranks over {self} is closed, with the engine or the context that made it")
        raise AttributeError(name)

    def __deepcopy__(self, memo: dict[int, object]) -> AxisGroup:
        return self

    def __str__(self) -> str:
        return "x".join(self.axes) if self.axes else "self"


def group_of(key: str) -> AxisGroup:
    """Return the group with this key, for operators of torch, which take only tensors, numbers and strings."""
    return _by_key[key]


def new_process_group(
    ranks: Sequence[int], index: int, name: str, timeout: timedelta, backend: str | None = None
) -> dist.ProcessGroup:
    """Return a process group with members in the order of ``ranks``. Exactly these ranks must call.

    ``dist.new_group`` names a group by the number that this process made before. Ranks that made different numbers of
    groups would then wait for each other forever, and a group that is made again would read the addresses of a
    destroyed one.

    Args:
        ranks: global ranks.
        index: the position of this process among them.
        name: the same on all of them, and never used before in this world.
        backend: by default that of the world.
    """
    world = dist.group.WORLD
    assert world is not None
    of_world, store = c10d._world.pg_map[world]
    # torch would split the communicator of a world with a device, in which all of its ranks must take part
    device, world.bound_device_id = world.bound_device_id, None
    try:
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            index,
            list(ranks),
            backend or of_world,
            store,
            c10d.GroupName(name),
            timeout=timeout,
            group_desc=name,
        )
    finally:
        world.bound_device_id = device
    assert isinstance(group, dist.ProcessGroup)
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """Return the store from which a process group was made."""
    return c10d._world.pg_map[group][1]


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Let collectives of this group fail after ``timeout``. Backends without time-outs (fake) do not change."""
    if not is_fake(group):
        c10d._set_pg_timeout(timeout, group)


def is_fake(group: dist.ProcessGroup | None = None) -> bool:
    """Return whether the ranks of a group, by default the world, are pretended: nothing travels between them."""
    return dist.get_backend(group) == dist.Backend.FAKE


def uses(backend: str, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether ranks of a group, by default the world, connect by a backend, for all tensors or for some."""
    return backend in dist.get_backend_config(group)  # as in "cpu:gloo,cuda:nccl"
