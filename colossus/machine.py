"""The resources of this machine: cores, memory, its network interfaces and addresses. No torch."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import resource
import socket
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

#: errors of a disk without room, or of a quota that is used up
DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)
#: bytes: a disk with less is full
LITTLE_ROOM = 1 << 20
#: usual plans reach a lower limit of open files
FEW_OPEN_FILES = 1024
_SIOCGIFADDR = 0x8915
_LOOPBACK = "127.0.0.1"
_REACH_SECONDS = 5.0
#: parameters of glibc's mallopt and their values: the free memory at the top of the heap that goes back to the system,
#: the bytes by which the heap grows, and the size from which an allocation is mapped by itself (the largest allowed)
_MALLOC_OPTIONS = ((-1, (1 << 31) - 1), (-2, 16 << 20), (-3, 32 << 20))
#: variables with which a user sets the same
_MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
#: the limits of the container that this process is in, if it is in one (cgroup v2)
_CGROUP = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Return the cores that this process may use: CPU affinity and a container's CPU quota both limit them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))


def threads_per_rank(local_ranks: int) -> int:
    """Return the compute threads of each of the ranks that share this machine, at least one."""
    return max(1, usable_cores() // max(1, local_ranks))


def processor_name() -> str:
    """Return the name of this machine's processor."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()


def loopback_interface() -> str | None:
    """Return the name of the loopback interface (``lo`` on Linux, ``lo0`` on macOS), None when there is none."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)


def host_id() -> str:
    """Return a text that all processes of one host share: its name, its boot, and its network namespace if known."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/net"))
    return " ".join(parts)


def interface_address(name: str) -> str | None:
    """Return the IPv4 address of a network interface, None without one (or if the system is not Linux)."""
    if sys.platform != "linux":
        return None
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            packed = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
    except OSError:
        return None
    return socket.inet_ntoa(packed[20:24])


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has this IPv4 address, None when no interface has it as its first."""
    return next((name for _, name in socket.if_nameindex() if interface_address(name) == address), None)


def is_loopback(address: str) -> bool:
    """Return whether no other machine can reach this address."""
    return address.startswith("127.") or address == "::1"


def address_towards(host: str) -> str | None:
    """Return the address of this machine from which it reaches ``host``, None without a route to it."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # a datagram socket: nothing is sent
            return str(probe.getsockname()[0])
    except OSError:
        return None


def own_address() -> str:
    """Return the address of this machine for the other hosts of a run.

    It is that of gloo's interface where it is set, else that from which the first rank's host (MASTER_ADDR) is reached,
    else the loopback's.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    own = interface_address(interface) if interface else None
    return own or address_towards(os.environ.get("MASTER_ADDR", _LOOPBACK)) or _LOOPBACK


def address_among(own: str, others: Iterable[str]) -> str:
    """Return the address at which machines with the addresses ``others`` reach this one.

    It is ``own`` unless that is the loopback's and one of theirs is not: a machine's own name, from which ``own`` may
    come, often means 127.0.1.1 there (Debian's /etc/hosts).
    """
    if not is_loopback(own):
        return own
    return next((address for other in others if not is_loopback(other) and (address := address_towards(other))), own)


def is_reachable(address: str) -> bool:
    """Return whether this machine reaches one of its own addresses; it does not if the loopback interface is down."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family) as listener, socket.socket(family) as probe:
        listener.bind((address, 0))
        listener.listen()
        probe.settimeout(_REACH_SECONDS)
        probe.connect(listener.getsockname())
        return True
    return False


def open_files() -> int | None:
    """Return how many files a process may open; None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def raise_open_files() -> None:
    """Raise this process's limit of open files to the highest allowed, since each connection is one."""
    with contextlib.suppress(OSError, ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def keep_freed_memory() -> None:
    """Let this process keep the memory of freed tensors for the next ones, which else fault in each page again.

    Activations come and go in every step, and glibc by default gives much of their memory back to the system. Nothing
    changes under another C library or allocator, or where the user's environment sets glibc's options.
    """
    if sys.platform == "linux" and not any(name in os.environ for name in _MALLOC_VARIABLES):
        with contextlib.suppress(OSError, AttributeError):  # a C library without mallopt
            mallopt = ctypes.CDLL(None).mallopt
            for option, value in _MALLOC_OPTIONS:
                mallopt(option, value)


def peak_resident_bytes() -> int:
    """Return the most memory of this process so far in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def memory_bytes() -> tuple[int, int | None]:
    """Return the memory that this process may use in total, and the free memory if known.

    A container's limit counts.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = None
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):
        limit = int((_CGROUP / "memory.max").read_text())
        total = min(total, limit)
        counts = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        # the file cache that the kernel frees first is not in use, as Kubernetes counts
        used = int((_CGROUP / "memory.current").read_text()) - int(counts["inactive_file"])
        unused = max(limit - used, 0)
        available = unused if available is None else min(available, unused)
    return total, available
