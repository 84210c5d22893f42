"""The device of a rank, and the process group of all ranks, which may exist already."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from datetime import timedelta

import torch
from torch import distributed as dist

from colossus.arithmetic import factors
from colossus.context.grid import RankGrid
from colossus.context.groups import AxisGroup, set_timeout
from colossus.context.visible_devices import counted_devices, explain_visible, may_be_of_one_rank


def pick_device(wanted: str, backend: str = "auto") -> torch.device:
    """Return the device of this rank. ``auto`` is CUDA if there is any: the device with the local rank's number.

    Under gloo, ranks share devices in turn. Where a rank that torchrun or srun has started sees only one device, each
    of its neighbours may see another (SLURM's ``--gpus-per-task``, a script that sets ``CUDA_VISIBLE_DEVICES`` by
    rank). If they do not, NCCL reports it.

    Args:
        backend: ``comm.backend``.

    Raises:
        ValueError: CUDA is requested and absent, or there are fewer devices than local ranks.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        note = explain_visible(os.environ, 0)
        raise ValueError(
            f"device = 'cuda', but torch finds no CUDA device here{note and f' ({note})'}; use device='auto' or 'cpu'"
        )
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if backend == "gloo" or (count == 1 and may_be_of_one_rank(os.environ)):
        local %= count
    if local >= count:
        note = explain_visible(os.environ, count)
        raise ValueError(
            f"local rank {local} has no CUDA device: {counted_devices(count)} here{note and f' ({note})'}; use "
            f"--nproc {count} or fewer. NCCL refuses two ranks on one device; comm.backend='gloo' lets ranks share "
            f"devices slowly: their messages go through the memory of the host"
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device


def choose_backend(wanted: str, device_type: str) -> str:
    """Return the backend for ranks that compute on ``device_type``.

    Args:
        wanted: ``comm.backend``.

    Raises:
        ValueError: nccl is requested, and there is no CUDA device.
    """
    if wanted == "nccl" and device_type != "cuda":
        raise ValueError(
            f"comm.backend = 'nccl' joins CUDA devices, but ranks compute on {device_type} here; use 'auto' or 'gloo'"
        )
    return ("nccl" if device_type == "cuda" else "gloo") if wanted == "auto" else wanted


def join_world(grid: RankGrid, rank: int, device: torch.device, wanted: str, timeout: timedelta) -> bool:
    """Make the process group of all ranks unless it exists, and set its time-out.

    Args:
        wanted: ``comm.backend``.

    Returns:
        Whether it was made here, and must be destroyed here.

    Raises:
        ValueError: the running processes do not match the grid, or none were launched.
    """
    backend = choose_backend(wanted, device.type)
    if device.type == "cuda" and torch.cuda.is_available():  # else a mesh takes the local rank's number
        torch.cuda.set_device(torch.cuda.current_device() if device.index is None else device.index)
    is_new = not dist.is_initialized()
    if is_new:
        if "MASTER_ADDR" not in os.environ:
            raise ValueError(
                f"this plan needs {grid.world_size} processes, but this one was started alone: start it with "
                f"`colossus launch`, torchrun or srun"
            )
        store = _fresh_store(rank, grid.world_size, timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=grid.world_size, timeout=timeout)
    if dist.get_world_size() != grid.world_size:
        raise ValueError(
            f"{factors(grid.sizes)} = {grid.world_size}, but {dist.get_world_size()} processes are running"
        )
    if dist.get_rank() != rank:
        raise ValueError(f"the context has rank {rank}, the process group has rank {dist.get_rank()}")
    if not is_new:
        assert dist.group.WORLD is not None
        set_timeout(dist.group.WORLD, timeout)
    return is_new


#: (address, port) of the launcher -> its store, and numbers for the worlds made from it
_stores: dict[tuple[str | None, str | None], tuple[dist.Store, Iterator[int]]] = {}


def _fresh_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Return the launcher's store under a prefix that no earlier world of this process has written to.

    Without the prefix a second world reads the addresses of the destroyed one ("Connection refused").
    """
    address, port = master = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if master not in _stores:
        try:
            store, _, _ = next(iter(dist.rendezvous("env://", rank, world_size, timeout=timeout)))
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"rank {rank} of {world_size} did not connect to the others at {address}:{port} (MASTER_ADDR, "
                f"MASTER_PORT) within {timeout.total_seconds():g} s: start all {world_size} with this address, which "
                f"they must reach; rank 0 listens there. {error}"
            ) from error
        _stores[master] = store, itertools.count()
    store, worlds = _stores[master]
    return dist.PrefixStore(f"colossus/world{next(worlds)}", store)


def launched_ranks(caller: str) -> AxisGroup:
    """Return the group of all ranks of ``torch.distributed``, or of a lone process, for calls outside contexts.

    Args:
        caller: the beginning of the error.

    Raises:
        ValueError: several processes were started, and have no process group yet.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        ranks = tuple(range(dist.get_world_size()))
        return AxisGroup(("world",), ranks, dist.get_rank(), dist.group.WORLD)
    started = os.environ.get("WORLD_SIZE", "1")
    if started.isdecimal() and int(started) > 1 and not dist.is_initialized():
        raise ValueError(
            f"{caller}: {started} processes were started (WORLD_SIZE), but they have no process group yet: call "
            f"colossus.initialize or torch.distributed.init_process_group first"
        )
    return AxisGroup((), (0,), 0, None)
