"""ParallelContext: the one object that knows ranks, axes, groups and devices."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from colossus.context.grid import ONE_RANK, Axes, LayerOptions, RankGrid, build_grid
from colossus.context.groups import AxisGroup, is_fake, new_process_group, set_timeout, store_of, uses
from colossus.context.precision import Precision
from colossus.context.rng_streams import RngStreams
from colossus.context.world import join_world

_stack: list[ParallelContext] = []
_joined: list[weakref.ref[ParallelContext]] = []


class ParallelContext:
    """One rank's view of the grid: its coordinates, a group for any axis or tuple of axes, its random streams.

    A process may make and close any number of contexts one after the other, all ranks in the same order. Inside ``with
    context:``, new layers take their axes from it.

    Args:
        grid: the axes and their sizes.
        rank: this process's global rank.
        device: the device of this rank.
        seed: seed of the random streams.
        timeout_seconds: time-out of collectives.
        backend: ``auto``, ``gloo`` or ``nccl``, see `choose_backend`. With gloo several ranks may share a device.
        options: options of the layers built under this context.
        precision: precision of the run, in which these layers compute.
        connect: False makes no process group: sizes and coordinates are known, to check a plan before it runs.
        on_join: called with the group of all ranks before any other group is made; if it raises, the join ends. Ranks
            that were started with different plans would make different groups, and wait for each other.

    Raises:
        ValueError: the running processes do not match the grid, or none were launched.
    """

    def __init__(
        self,
        grid: RankGrid,
        rank: int = 0,
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
        timeout_seconds: float = 120.0,
        backend: str = "auto",
        options: LayerOptions | None = None,
        precision: Precision | None = None,
        connect: bool = True,
        on_join: Callable[[AxisGroup], None] | None = None,
    ) -> None:
        self.grid = grid
        self.rank = rank
        self.device = torch.device(device)
        self.options = options or LayerOptions()
        self.precision = precision or Precision()
        self.rng = RngStreams(seed)
        self.coordinates = grid.coordinates(rank)
        self.timeout = timedelta(seconds=timeout_seconds)
        self._groups: dict[tuple[str | int, ...], AxisGroup] = {}
        self._own_groups: list[dist.ProcessGroup] = []
        self._mesh: DeviceMesh | None = None
        self._number = 0
        self._owns_world = False
        self.closed = False
        if grid.world_size > 1 and connect:
            self._join(backend, on_join)
            _joined.append(weakref.ref(self))

    @classmethod
    def from_config(
        cls,
        config: Any,
        *,
        rank: int | None = None,
        device: torch.device | str = "cpu",
        connect: bool = True,
        on_join: Callable[[AxisGroup], None] | None = None,
    ) -> ParallelContext:
        """Return the context of a resolved config; a None rank is the launcher's (``RANK``)."""
        if rank is None:
            rank = int(os.environ.get("RANK", "0")) if connect else 0
        return cls(
            build_grid(config.parallel),
            rank,
            device=device,
            seed=config.train.seed,
            timeout_seconds=config.comm.timeout_seconds,
            backend=config.comm.backend,
            options=LayerOptions.from_config(config),
            precision=Precision.from_config(config.train.precision),
            connect=connect,
            on_join=on_join,
        )

    def _join(self, wanted: str, on_join: Callable[[AxisGroup], None] | None) -> None:
        self._owns_world = join_world(self.grid, self.rank, self.device, wanted, self.timeout)
        world = dist.group.WORLD
        assert world is not None
        if on_join is not None:
            try:
                on_join(AxisGroup(("world",), tuple(range(self.world_size)), self.rank, world))
            except BaseException:
                self.close()
                raise
        if not is_fake():
            # counts the contexts that this rank has joined in this world, so that all ranks agree on the number
            self._number = store_of(world).add(f"contexts/{self.rank}", 1)
        shape = tuple(self.grid.sizes.values())
        self._mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=self.grid.names)
        for group in self._axis_groups():  # a mesh gives its groups torch's 30 minutes
            set_timeout(group, self.timeout)
        if uses(dist.Backend.GLOO):
            dist.barrier()  # a rank that ends early must not end one that is still connecting to it
        for name in self.grid.public.get("tensor", ()):  # made here, so that no compiler traces their construction
            self.group(name)

    # -- axes ---------------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        return self.grid.world_size

    @property
    def is_logging_rank(self) -> bool:
        return self.rank == 0

    @property
    def mesh(self) -> DeviceMesh:
        """The DeviceMesh over all atomic axes."""
        if self._mesh is None:
            raise ValueError("a plan with one process has no device mesh")
        return self._mesh

    def size(self, axes: Axes) -> int:
        return self.grid.size(axes)

    def index(self, axes: Axes) -> int:
        """Return the position of this rank along an axis, a public name, or a tuple of them."""
        return self.grid.index(self.rank, axes)

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The atomic axes inside a replica, one whole copy of the model: all except those of data."""
        data = self.grid.axes("data")
        return tuple(axis for axis in self.grid.names if axis not in data)

    def group(self, axes: Axes) -> AxisGroup:
        """Return the group of this rank over these axes; axes of one rank do not count.

        The first call creates the group, and all of its ranks must make it.
        """
        names = tuple(name for name in self.grid.axes(axes) if self.grid.sizes[name] > 1)
        return self._groups.get(names) or self._make_group(names, names, self.grid.group(self.rank, names))

    def state_group(self, axes: Axes) -> AxisGroup:
        """Return the group over these axes for gradients and stored weights, which travel while activations do.

        On an accelerator the collectives of one communicator run one after the other. So where activations travel over
        the same ranks (to split tokens or features, or to their experts) this is another group.
        """
        group, grid = self.group(axes), self.grid
        of_activations = {*grid.axes("tensor"), *grid.axes("sequence"), *grid.expert_axes}
        if group.size == 1 or group.is_on_host or not of_activations.issuperset(group.axes):
            return group
        key = ("state", *group.axes)
        return self._groups.get(key) or self._make_group(key, group.axes, group.ranks)

    def subgroup(self, axes: Axes, indices: Sequence[int], label: str | None = None) -> AxisGroup:
        """Return a group of some ranks along axes, by their indices in the group over these axes.

        This rank must be one of them, and all of them must call.

        Args:
            label: the name under which its bytes are counted, by default the axes.
        """
        names = self.grid.axes(axes)
        key: tuple[str | int, ...] = (label or "", *names, *indices)
        if key in self._groups:
            return self._groups[key]
        along_axes = self.grid.group(self.rank, names)
        return self._make_group(key, (label,) if label else names, [along_axes[index] for index in indices])

    def background_group(self, label: str, timeout: timedelta) -> AxisGroup:
        """Return a gloo group of all ranks, separate from training, for objects that a thread exchanges.

        The first call for a label creates it: all ranks must make it.
        """
        key = (label,)
        return self._groups.get(key) or self._make_group(key, key, range(self.world_size), timeout, dist.Backend.GLOO)

    def groups_within(self, axes: Sequence[str]) -> list[AxisGroup]:
        """Return the existing groups of several ranks along these axes, or some of them."""
        return [group for group in self._groups.values() if group.size > 1 and set(axes).issuperset(group.axes)]

    def _make_group(
        self,
        key: tuple[str | int, ...],
        names: tuple[str, ...],
        members: Sequence[int],
        timeout: timedelta | None = None,
        backend: str | None = None,
    ) -> AxisGroup:
        """Make the group of a key: the world or an axis of the mesh where it is one of these, else a new group."""
        if self.closed:
            raise ValueError("this ParallelContext is closed")
        ranks, process_group = tuple(members), None
        if len(ranks) > 1:
            is_of_axes = key == names and (backend is None or is_fake())
            if is_of_axes and ranks == tuple(range(self.world_size)):
                process_group = dist.group.WORLD
            elif is_of_axes and len(names) == 1:
                process_group = self.mesh.get_group(names[0])
            else:
                suffix = "" if key == names else f"/{key[0] or 'some'}"  # another group may have these axes and ranks
                name = f"colossus/{self._number}/{'x'.join(names)}/{'_'.join(map(str, ranks))}{suffix}"
                process_group = new_process_group(ranks, ranks.index(self.rank), name, timeout or self.timeout, backend)
                self._own_groups.append(process_group)
                if uses(dist.Backend.GLOO, process_group):
                    dist.barrier(process_group)  # a rank that ends early must not end one that is connecting to it
        group = self._groups[key] = AxisGroup(names, ranks, ranks.index(self.rank), process_group)
        group.sums_in_tree = self.options.reproducible and not set(self.grid.axes("tensor")).isdisjoint(names)
        return group

    def _axis_groups(self) -> list[dist.ProcessGroup]:
        """Return the mesh's own groups, without the world where an axis spans all ranks."""
        if self._mesh is None:
            return []
        groups = [self._mesh.get_group(name) for name in self.grid.names]
        return [group for group in groups if group is not dist.group.WORLD]

    # -- lifetime ---------------------------------------------------------------------------------------------

    def store(self) -> dist.Store:
        """Return a store that all ranks of this context share, for values that no collective may carry."""
        assert dist.group.WORLD is not None
        return dist.PrefixStore(f"context{self._number}", store_of(dist.group.WORLD))

    def close(self) -> None:
        """Close the connections of its groups, and destroy the groups that it made. A second call does nothing."""
        if self.closed:
            return
        self.closed = True
        if self in _stack:
            _stack.remove(self)
        _joined[:] = [reference for reference in _joined if reference() not in (None, self)]
        for axis_group in self._groups.values():
            axis_group.close()
        if dist.is_initialized():
            if self._owns_world:
                dist.destroy_process_group()
            else:
                # in one order on all ranks: where communicators end, their ranks wait for each other
                for group in sorted((*self._own_groups, *self._axis_groups()), key=lambda group: group.group_name):
                    dist.destroy_process_group(group)
        self._groups.clear()
        self._own_groups.clear()
        self._mesh = None

    def __enter__(self) -> ParallelContext:
        _stack.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self in _stack:
            _stack.remove(self)

    def __deepcopy__(self, memo: dict[int, object]) -> ParallelContext:
        """Return the context itself: a copied model belongs to the same context."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Reduce to the properties that the current context must have when a pickled model is loaded."""
        return _context_like, (self.grid, self.rank, self.options, self.rng.seed)

    def __repr__(self) -> str:
        at = ", ".join(f"{name} {self.coordinates[name]}/{size}" for name, size in self.grid.sizes.items())
        return f"ParallelContext(rank {self.rank}/{self.world_size}: {at})"


def current_context() -> ParallelContext:
    """Return the innermost context entered with ``with``; else the last open one that joined other ranks.

    Without either, it is a context of one process without parallelism.
    """
    if _stack:
        return _stack[-1]
    for reference in reversed(_joined):
        context = reference()
        if context is not None and not context.closed:
            return context
    return one_rank()


def one_rank() -> ParallelContext:
    """Return a context of this process alone."""
    return ParallelContext(ONE_RANK)


def _context_like(grid: RankGrid, rank: int, options: LayerOptions, seed: int) -> ParallelContext:
    """Return the current context if it equals a pickled one; without parallelism, a new one."""
    if grid.world_size == 1:
        return ParallelContext(grid, seed=seed, options=options)
    current = current_context()
    if (current.grid, current.rank, current.options) != (grid, rank, options):
        raise ValueError(
            f"this is a shard of a model of rank {rank} of {grid.world_size}, and only that rank of that plan can load "
            f"it; colossus.checkpoint.full_state_dict returns a whole state, which any plan can load"
        )
    return current
