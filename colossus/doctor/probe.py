"""How fast ranks on this machine talk to each other: a few collectives between processes made for it."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import distributed as dist

from colossus.context.local_ranks import RanksFailed, run_local_ranks

SMALL_BYTES = 4 * 1024
LARGE_BYTES = 64 * 1024 * 1024


def measure(nproc: int, *, cuda: bool = False, timeout: float = 60.0) -> dict[str, float]:
    """Seconds and bytes per second between ``nproc`` ranks, at least 2, on this machine.

    Returns:
        ``all_reduce_small_seconds`` (4 KB), ``all_reduce_large_seconds`` (64 MB) and its bus bandwidth
        ``all_reduce_bytes_per_second`` (2 (n-1)/n of the size over the time), ``send_small_seconds`` (one way)
        and ``send_bytes_per_second`` between ranks 0 and 1.

    Raises:
        RuntimeError: when ranks fail, or when nothing moves for ``timeout`` seconds; says which.
    """
    # Fork needs no second import of torch, but neither CUDA nor macOS allows it.
    start = "spawn" if cuda or sys.platform == "darwin" else "fork"
    backend = "nccl" if cuda else "gloo"
    # a rank that waits for CUDA spins, which does not look like silence: there NCCL's watchdog must end it
    limit = timeout if cuda else None
    body = partial(_rank, nproc, cuda)
    try:
        found = run_local_ranks(nproc, body, patience=timeout, start=start, backend=backend, collective_timeout=limit)
    except RanksFailed as error:
        if error.silent:
            raise RuntimeError(f"ranks {error.silent} did not answer within {timeout:g} s") from None
        for text in error.tracebacks.values():
            print(text, file=sys.stderr)
        failed = {rank: code for rank, code in error.exit_codes.items() if code} | dict.fromkeys(error.tracebacks, 1)
        raise RuntimeError(f"ranks ended with exit codes {failed}") from None
    return found[0]


def _rank(nproc: int, cuda: bool, rank: int) -> dict[str, float]:
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    small = torch.zeros(SMALL_BYTES // 4, device=device)
    large = torch.zeros(LARGE_BYTES // 4, device=device)
    found = {
        "all_reduce_small_seconds": _seconds(lambda: dist.all_reduce(small), 50, device),
        "all_reduce_large_seconds": _seconds(lambda: dist.all_reduce(large), 3, device),
    }
    moved = 2 * (nproc - 1) / nproc * LARGE_BYTES
    found["all_reduce_bytes_per_second"] = moved / found["all_reduce_large_seconds"]
    found["send_small_seconds"] = _seconds(lambda: _there_and_back(small, rank), 50, device) / 2
    found["send_bytes_per_second"] = LARGE_BYTES / (_seconds(lambda: _there_and_back(large, rank), 3, device) / 2)
    return found


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
