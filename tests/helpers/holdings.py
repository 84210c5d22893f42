"""What a process has at a moment, to be compared with what it has later."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
import types
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

#: of the allocator's memory some megabytes come with the first engines and stay
ALLOWANCE = 8 << 20
_libc = ctypes.CDLL(None)
_MMAP_THRESHOLD, _ARENA_MAX = -3, -8


def give_memory_back() -> None:
    """Have this process's allocator keep little of what is freed, whichever thread frees it."""
    _libc.mallopt(_ARENA_MAX, 1)
    _libc.mallopt(_MMAP_THRESHOLD, 1 << 16)


class Holdings:
    """What this process has once everything that nobody refers to is gone.

    Attributes:
        counts: kind of thing -> how many: open files, threads, child processes, mappings of files and of shared memory
            (the allocator's own come and go), process groups, live objects of the package's classes, its functions
            (hooks, what waits), tensors.
        resident: bytes of memory that are this process's alone.
    """

    def __init__(self) -> None:
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join()  # it has done what was waited for, and ends
        time.sleep(0.02)
        gc.collect()
        _libc.malloc_trim(0)
        self.counts: Counter[str] = Counter(
            {
                "threads": len(os.listdir("/proc/self/task")),
                "child processes": len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
                "process groups": len(c10d._world.pg_map),
            }
        )
        self.counts.update(map("open files: {}".format, _files()))
        self.counts.update(map("mappings: {}".format, _mappings()))
        self.counts.update(map("objects: {}".format, filter(None, map(_kind, gc.get_objects()))))
        _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
        self.resident = (resident - shared) * os.sysconf("SC_PAGE_SIZE")

    def growth_since(self, before: Holdings) -> list[str]:
        """Return what there is more of than before, a line each."""
        lines = [
            f"{kind}: {before.counts[kind]} -> {count}"
            for kind, count in self.counts.items()
            if count > before.counts[kind]
        ]
        if self.resident > before.resident + ALLOWANCE:
            lines.append(f"resident memory: {before.resident >> 10} -> {self.resident >> 10} KiB")
        return lines


def _files() -> list[str]:
    """What open descriptors lead to."""
    paths = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists them
            paths.append(os.readlink(f"/proc/self/fd/{number}"))
    return [_without_number(path) for path in paths]


def _mappings() -> list[str]:
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    return [_without_number(line[5]) for line in lines if len(line) == 6 and not line[5].startswith("[")]


def _without_number(path: str) -> str:
    """The kind of a socket, a pipe, or a file of a temporary name."""
    return "/dev/shm" if path.startswith("/dev/shm/") else path.partition(":[")[0]


def _kind(thing: object) -> str | None:
    kind = type(thing)
    if issubclass(kind, torch.Tensor):
        return "tensors"
    named: Any = thing if kind is types.FunctionType else kind
    return f"{named.__module__}.{named.__qualname__}" if str(named.__module__).startswith("colossus") else None
