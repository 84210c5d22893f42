"""The process group of all ranks: joined, or taken as it is, and what its ranks agree on."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
from torch import distributed as dist

from colossus.arithmetic import factors, named_ranks
from colossus.context.device import require_own_device
from colossus.context.grid import RankGrid
from colossus.context.groups import set_timeout, store_of

#: whose ranks are other processes
BACKENDS = dist.Backend.GLOO, dist.Backend.NCCL


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


def join_world(grid: RankGrid, rank: int, device: torch.device, wanted: str, timeout: timedelta) -> bool:
    """Make the process group of all ranks where there is none yet, and give it this time-out.

    Args:
        wanted: ``comm.backend``.

    Returns:
        Whether it was made here, and so is to be destroyed here.

    Raises:
        ValueError: when the processes that run are not those of the grid, or none were launched, or for a backend that
            cannot join them.
    """
    backend = choose_backend(wanted, device.type)
    if device.type == "cuda" and torch.cuda.is_available():  # else a mesh takes that of the local rank's number
        torch.cuda.set_device(torch.cuda.current_device() if device.index is None else device.index)
    is_new = not dist.is_initialized()
    if is_new:
        if "MASTER_ADDR" not in os.environ:
            raise ValueError(
                f"this plan needs {grid.world_size} processes, but this one was started alone: start it with "
                f"`colossus launch`, torchrun or srun"
            )
        if backend not in BACKENDS:
            raise ValueError(
                f"comm.backend = {wanted!r}: 'auto', 'gloo' or 'nccl' join ranks here; for another one call "
                f"torch.distributed.init_process_group first"
            )
        store = fresh_store(rank, grid.world_size, timeout)
        if backend == "nccl":
            require_own_device(store, rank, device)
        dist.init_process_group(backend, store=store, rank=rank, world_size=grid.world_size, timeout=timeout)
    if dist.get_world_size() != grid.world_size:
        raise ValueError(
            f"{factors(grid.sizes)} = {grid.world_size}, but {dist.get_world_size()} processes are running"
        )
    joined_by = dist.get_backend()
    if wanted != "auto" and joined_by in BACKENDS and joined_by != wanted:
        raise ValueError(
            f"comm.backend = {wanted!r}, but the process group that exists already is of {joined_by}: make it with "
            f"torch.distributed.init_process_group({wanted!r}), or leave comm.backend at 'auto'"
        )
    if dist.get_rank() != rank:
        raise ValueError(f"the context was given rank {rank}, the process group says {dist.get_rank()}")
    if not is_new:
        assert dist.group.WORLD is not None
        set_timeout(dist.group.WORLD, timeout)
    return is_new


#: by address and port of the launcher: its store, and numbers for the worlds made from it
_stores: dict[tuple[str | None, str | None], tuple[dist.Store, Iterator[int]]] = {}


def fresh_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The launcher's store under a prefix that no earlier world of this process has written to.

    Without it a world made after another reads the addresses of the destroyed one ("Connection refused").

    Raises:
        ValueError: for a port that is none, or when the store cannot be reached, or not all ranks reach it.
    """
    address, port = master = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if master not in _stores:
        if port is None or not port.isdecimal():
            given = "not set" if port is None else repr(port)
            raise ValueError(f"MASTER_PORT is {given}: it is the number of a port at MASTER_ADDR = {address}")
        try:
            store, _, _ = next(iter(dist.rendezvous("env://", rank, world_size, timeout=timeout)))
        except RuntimeError as error:
            raise ValueError(
                f"rank {rank} of {world_size} has not met the others at {address}:{port} (MASTER_ADDR, MASTER_PORT) "
                f"within {timeout.total_seconds():g} s: all {world_size} must be started, with this address, and reach "
                f"it; rank 0 listens there. {error}"
            ) from error
        _stores[master] = store, itertools.count()
    store, worlds = _stores[master]
    return dist.PrefixStore(f"colossus/world{next(worlds)}", store)


def agree_on_context(rank: int, axes: str, timeout: timedelta) -> int:
    """How many contexts the ranks of this world have made, this one included: the same on all of them.

    Their groups and values are named by it. A count of this process would depend on what else it has made. Rank 0
    hears all others before any goes on, so that nobody waits for one that does not come.

    Args:
        axes: of the new context, in words.

    Raises:
        ValueError: on all ranks, when one makes another context, or none.
    """
    assert dist.group.WORLD is not None
    store = store_of(dist.group.WORLD)
    number = store.add(f"contexts/{rank}", 1)
    place = f"context{number}"
    store.set(f"{place}/axes/{rank}", axes)
    mine = f"rank {rank} makes its context {number} with axes {axes}"
    if rank == 0:
        store.set(f"{place}/verdict", _compare(store, place, mine, timeout))
    elif not _comes(store, f"{place}/axes/0", timeout):
        raise ValueError(
            f"{mine}, but rank 0 has not made one within {timeout.total_seconds():g} s: {_SAME}, also where only some "
            f"of them use one"
        )
    store.wait([f"{place}/verdict"], 2 * timeout)
    verdict = store.get(f"{place}/verdict").decode()
    if verdict:
        raise ValueError(verdict)
    return number


_SAME = "all ranks make the same contexts in the same order"


def _comes(store: dist.Store, key: str, timeout: timedelta) -> bool:
    try:
        store.wait([key], timeout)
    except RuntimeError:
        return False
    return True


def _compare(store: dist.Store, place: str, mine: str, timeout: timedelta) -> str:
    """What is wrong with the contexts that the ranks make at one place, an empty string where nothing is.

    Args:
        mine: that of rank 0, in words.
    """
    keys = [f"{place}/axes/{rank}" for rank in range(dist.get_world_size())]
    end = time.monotonic() + timeout.total_seconds()
    if not all(_comes(store, key, timedelta(seconds=max(0.1, end - time.monotonic()))) for key in keys):
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        return (
            f"{mine}, but {named_ranks(missing)} made none within {timeout.total_seconds():g} s: {_SAME}, also where "
            f"only some of them use one"
        )
    axes = [each.decode() for each in store.multi_get(keys)]
    other = next((rank for rank, each in enumerate(axes) if each != axes[0]), None)
    return "" if other is None else f"{mine}, but rank {other} makes its with {axes[other]}: {_SAME}"
