"""Peak memory of a training case: tensors that stay between steps, and what a step needs on top.

What stays between steps is counted, tensor by tensor. What a step adds is read from the operating system (the peak of
the resident set while it runs), since no counter sees it all: a dispatch mode sees DTensor from outside only and
changes the path that collectives take, and the profiler misses what the threads of a backend release.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import Case
from colossus.comm.shared_memory import mapped_storages

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_CPU = torch.profiler.ProfilerActivity.CPU
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True)
class Memory:
    """Bytes: ``resident`` between steps (weights, gradients, optimizer, batches), ``peak`` within one."""

    resident: int
    peak: int


def measure(make: Callable[[], Case], steps: int = 3) -> Memory | None:
    """Return the memory of a case in this process, to a quarter of a MB; None where the system is not Linux.

    The first two steps are left out: they make the optimizer's state, buckets and the like.
    """
    if not _CLEAR.exists():
        return None
    pages_of_their_own()
    case = make()
    for index in range(2):
        case.step(index)
    resident = live_bytes()

    def run() -> None:
        for index in range(steps):
            case.step(2 + index)

    return Memory(resident, resident + (resident_growth(run) or 0))


def pages_of_their_own() -> None:
    """Give every tensor of some size pages that are freed at once: else the resident set remembers old peaks."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 64 << 10)
    libc.mallopt(_M_TRIM_THRESHOLD, 64 << 10)


def resident_growth(run: Callable[[], object]) -> int | None:
    """Return by how many bytes this process is larger at most during a call than before; None where nobody knows.

    The system counts in batches of pages, so a call that needs nothing may seem to need less than that.
    """
    if not _CLEAR.exists():
        return None
    before = _status("VmRSS")
    _CLEAR.write_text("5")  # the peak starts from here
    run()
    return max(0, _status("VmHWM") - before)


def allocated_peak(step: Callable[[], object]) -> int:
    """Return the most bytes that torch's allocator gives out during a call, on top of those before, counted exactly.

    What collectives' own threads allocate is not seen; on one host, where they go through shared memory, there is none.
    """
    with _standard_error_off(), torch.profiler.profile(activities=[_CPU], profile_memory=True) as profile:
        step()
    now = most = 0
    results: Any = profile.profiler
    for event in results.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


@contextlib.contextmanager
def _standard_error_off() -> Iterator[None]:
    """Silence the lines that the profiler's library writes."""
    error, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(error, 2)
        os.close(error)
        os.close(nothing)


def _status(key: str) -> int:
    match = re.search(rf"^{key}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) << 10


def live_bytes() -> int:
    """Return the bytes of all storages that some tensor of this process uses, without memory that ranks share."""
    gc.collect()
    storages: dict[int, int] = {}
    # issubclass of the type: isinstance would ask torch's deprecated module objects for their class, and they warn
    todo: list[Any] = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    while todo:
        tensor = todo.pop()
        if tensor.is_leaf and tensor.grad is not None:
            todo.append(tensor.grad)
        local = getattr(tensor, "_local_tensor", None)  # a DTensor has no storage but its shard's
        if local is not None:
            todo.append(local)
        elif not tensor.is_meta:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    shared = mapped_storages()
    return sum(size for place, size in storages.items() if place not in shared)
