"""How fast ranks on this machine talk to each other: a few collectives between processes made for it."""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

SMALL_BYTES = 4 * 1024
LARGE_BYTES = 64 * 1024 * 1024


def measure(nproc: int, *, cuda: bool = False, timeout: float = 60.0) -> dict[str, float]:
    """Seconds and bytes per second between ``nproc`` ranks on this machine.

    Returns:
        ``all_reduce_small_seconds`` (4 KB), ``all_reduce_large_seconds`` (64 MB) and its bus bandwidth
        ``all_reduce_bytes_per_second`` (2 (n-1)/n of the size over the time), ``send_small_seconds`` (one way)
        and ``send_bytes_per_second`` between ranks 0 and 1.

    Raises:
        RuntimeError: when the ranks fail or do not finish within ``timeout`` seconds; says which.
    """
    # Fork needs no second import of torch, but neither CUDA nor macOS allows it. One thread: a child of a process
    # that has run a multi-threaded operation hangs in its first one.
    method = "spawn" if cuda or sys.platform == "darwin" else "fork"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    context: Any = multiprocessing.get_context(method)
    answers: SimpleQueue[dict[str, float]] = context.SimpleQueue()
    try:
        with tempfile.TemporaryDirectory(prefix="colossus-doctor-") as folder:
            store = str(Path(folder) / "store")
            ranks = [
                context.Process(target=_rank, args=(rank, nproc, store, cuda, answers), daemon=True)
                for rank in range(nproc)
            ]
            for process in ranks:
                process.start()
            deadline = time.monotonic() + timeout
            for process in ranks:
                process.join(max(0.0, deadline - time.monotonic()))
            late = [rank for rank, process in enumerate(ranks) if process.is_alive()]
            for process in ranks:
                process.kill()
            if late:
                raise RuntimeError(f"ranks {late} did not answer within {timeout:g} s")
            failed = {rank: process.exitcode for rank, process in enumerate(ranks) if process.exitcode}
            if failed:
                raise RuntimeError(f"ranks ended with exit codes {failed}")
            return answers.get()
    finally:
        torch.set_num_threads(threads)


def _rank(rank: int, nproc: int, store: str, cuda: bool, answers: SimpleQueue[dict[str, float]]) -> None:
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", store=dist.FileStore(store, nproc), rank=rank, world_size=nproc)
    small = torch.zeros(SMALL_BYTES // 4, device=device)
    large = torch.zeros(LARGE_BYTES // 4, device=device)
    found = {
        "all_reduce_small_seconds": _seconds(lambda: dist.all_reduce(small), 50, device),
        "all_reduce_large_seconds": _seconds(lambda: dist.all_reduce(large), 3, device),
    }
    moved = 2 * (nproc - 1) / nproc * LARGE_BYTES
    found["all_reduce_bytes_per_second"] = moved / found["all_reduce_large_seconds"]
    if nproc > 1:
        found["send_small_seconds"] = _seconds(lambda: _there_and_back(small, rank), 50, device) / 2
        found["send_bytes_per_second"] = LARGE_BYTES / (_seconds(lambda: _there_and_back(large, rank), 3, device) / 2)
    if rank == 0:
        answers.put(found)
    dist.destroy_process_group()


def _there_and_back(tensor: torch.Tensor, rank: int) -> None:
    if rank == 0:
        dist.send(tensor, 1)
        dist.recv(tensor, 1)
    elif rank == 1:
        dist.recv(tensor, 0)
        dist.send(tensor, 0)


def _seconds(call: Callable[[], object], times: int, device: torch.device) -> float:
    """Median time of a call after two to warm up."""
    taken = []
    for number in range(times + 2):
        dist.barrier()
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= 2:
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)
