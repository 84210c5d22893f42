"""Forked gloo workers behind one function: ``run_ranks(4, body, ...)`` runs ``body(context, ...)`` on four ranks.

Fork (0.1 s for 4 ranks) instead of spawn (seconds): the parent must never have run a multi-threaded operation, so
one thread is set on import, before anything else.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import distributed as dist

from colossus.comm import log
from colossus.context.grid import RankGrid
from colossus.context.layer_options import LayerOptions
from colossus.context.parallel_context import ParallelContext

torch.set_num_threads(1)


class RankError(AssertionError):
    """One or more ranks failed; the message holds every traceback."""


def grid(data: int = 1, tensor: int = 1, pipeline: int = 1, sequence: int = 1) -> RankGrid:
    sizes = {"pipeline": pipeline, "data": data, "sequence": sequence, "tensor": tensor}
    return RankGrid(sizes, {name: (name,) for name in sizes})


def grid_of(tensor: dict[str, int], data: int = 1) -> RankGrid:
    """A grid whose tensor parallelism has these atomic axes."""
    sizes = {"pipeline": 1, "data": data, "sequence": 1, **tensor}
    return RankGrid(sizes, {name: (name,) for name in ("pipeline", "data", "sequence")} | {"tensor": tuple(tensor)})


def run_ranks(
    world: int,
    body: Callable[..., Any],
    *args: Any,
    plan: RankGrid | None = None,
    timeout: float = 60.0,
    with_context: bool = True,
    mode: str = "1d",
    **options: Any,
) -> list[Any]:
    """``body(context, *args)`` on every rank of ``plan`` (by default 1D tensor over all); the ranks' results.

    With ``with_context=False`` the body gets its rank and finds the environment of a launcher set. ``options`` are of
    the context or of its layers.
    """
    plan = plan or grid(tensor=world)
    assert plan.world_size == world
    of_layers = {name: options.pop(name) for name in LayerOptions.__dataclass_fields__ if name in options}
    layer_options = LayerOptions(tensor_mode=mode, **of_layers)
    store_path = tempfile.mktemp(prefix="ranks")
    pipes: dict[int, int] = {}
    pids: dict[int, int] = {}
    for rank in range(world):
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read_end)
            make = partial(ParallelContext, plan, rank, options=layer_options, **options) if with_context else None
            _child(rank, world, store_path, write_end, body, args, timeout, make)
        os.close(write_end)
        pipes[read_end] = rank
        pids[rank] = pid
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    buffers = {fd: bytearray() for fd in pipes}
    deadline = time.monotonic() + timeout
    while pipes and time.monotonic() < deadline:
        for fd in select.select(list(pipes), [], [], 0.5)[0]:
            piece = os.read(fd, 1 << 20)
            if piece:
                buffers[fd] += piece
                continue
            rank = pipes.pop(fd)
            os.close(fd)
            if not buffers[fd]:
                errors[rank] = "died without a word (abort or signal)"
                continue
            ok, value = pickle.loads(bytes(buffers[fd]))
            (results if ok else errors)[rank] = value
    for rank, pid in pids.items():
        if rank in pipes.values():
            os.kill(pid, signal.SIGKILL)
            errors[rank] = f"did not finish within {timeout} s"
        os.waitpid(pid, 0)
    if os.path.exists(store_path):
        os.unlink(store_path)
    if errors:
        raise RankError("\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(errors.items())))
    return [results[rank] for rank in range(world)]


def _child(
    rank: int,
    world: int,
    store_path: str,
    write_end: int,
    body: Callable[..., Any],
    args: tuple[Any, ...],
    timeout: float,
    make_context: Callable[[], ParallelContext] | None,
) -> None:
    try:
        log.clear()
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
        if world > 1:
            from datetime import timedelta

            store = dist.FileStore(store_path, world)
            dist.init_process_group(
                "gloo", rank=rank, world_size=world, store=store, timeout=timedelta(seconds=min(timeout, 20))
            )
        value = body(rank if make_context is None else make_context(), *args)
        payload = pickle.dumps((True, value))
    except BaseException as error:
        lines = "\n".join(log.recent()[-6:])
        payload = pickle.dumps((False, f"{traceback.format_exc()}\n{type(error).__name__}; last collectives:\n{lines}"))
    with os.fdopen(write_end, "wb") as out:
        out.write(payload)
    os._exit(0)
