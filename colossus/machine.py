"""What this machine offers: cores, memory, its loopback interface. No torch."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
from pathlib import Path


def usable_cores() -> int:
    """Cores this process may use: CPU affinity and a container's CPU quota both limit them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))


def threads_per_rank(local_ranks: int) -> int:
    """Compute threads of each of the ranks that share this machine, at least one."""
    return max(1, usable_cores() // max(1, local_ranks))


def loopback_interface() -> str | None:
    """Name of the loopback interface (``lo`` on Linux, ``lo0`` on macOS), None when there is none."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)


def host_id() -> str:
    """The same for processes of one host: its name, its boot, and where there are such the network namespace."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/net"))
    return " ".join(parts)


def peak_resident_bytes() -> int:
    """The most memory this process has held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def memory_bytes() -> tuple[int, int | None]:
    """Memory this process may use in total (a container's limit counts), and what is free now if known."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = None
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total, available


def gigabytes(size: float) -> str:
    """``1.2 GB``, or ``310 MB`` below one."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
