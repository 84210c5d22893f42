"""Host names, ports and limits of this machine that make trouble for distributed runs. No torch."""

from __future__ import annotations

import errno
import os
import resource
import socket
import threading
import time
from dataclasses import dataclass

from colossus.machine import is_loopback


@dataclass(frozen=True)
class HostName:
    """What this machine's own name resolves to.

    Attributes:
        address: None when the name does not resolve (or not within the time given).
        is_local: the address belongs to this machine.
        is_loopback: the address is one that other machines cannot reach.
        seconds: how long resolving took.
    """

    name: str
    address: str | None
    is_local: bool
    is_loopback: bool
    seconds: float


def resolve_own_name(timeout: float = 3.0) -> HostName:
    """Resolve the host name, waiting at most ``timeout`` seconds for the answer."""
    name = socket.gethostname()
    found: list[str] = []

    def ask() -> None:
        try:
            found.append(str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]))
        except OSError:
            return

    began = time.perf_counter()
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(timeout)
    seconds = time.perf_counter() - began
    if not found:
        return HostName(name, None, False, False, seconds)
    address = found[0]
    return HostName(name, address, _can_bind(address), is_loopback(address), seconds)


def port_is_taken(port: int) -> bool:
    """Whether somebody listens on (or holds) this TCP port here."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free for a new run
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def advise_name(host: HostName) -> list[str]:
    """What to do about this host name; empty when it will make no trouble."""
    advice = []
    if host.address is None:
        advice.append(
            f"the host name {host.name!r} does not resolve: runs on this machine alone use the loopback and work; for "
            f"runs over several machines add it to /etc/hosts with the address of the network card"
        )
    elif not host.is_local:
        advice.append(
            f"the host name {host.name!r} resolves to {host.address}, which is not an address of this machine: correct "
            f"/etc/hosts, or set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the network card's name"
        )
    elif host.is_loopback:
        advice.append(
            f"the host name {host.name!r} resolves to {host.address}, the loopback: fine on one machine, and with "
            f"several under `colossus launch`; torchrun and srun need MASTER_ADDR to be a network address, and "
            f"GLOO_SOCKET_IFNAME the network card's name"
        )
    if host.seconds > 1.0:
        advice.append(f"resolving {host.name!r} took {host.seconds:.1f} s, at every start: add it to /etc/hosts")
    return advice


def advise_port(port: int, taken: bool, master_port: str) -> list[str]:
    """What to do when the rendezvous port is taken, or ``master_port`` (the variable's text) is not a number."""
    if master_port and not master_port.isdecimal():
        return [f"MASTER_PORT={master_port} is not a number: unset it, or set a free port"]
    if not taken:
        return []
    whose = "MASTER_PORT" if master_port else "torchrun's default port"
    return [
        f"port {port} ({whose}) is taken by another process: ranks that torchrun or srun starts would connect to a "
        f"stranger and hang; set MASTER_PORT to a free one. `colossus launch` on one machine picks a free port itself"
    ]


def limits() -> dict[str, int | None]:
    """Open files (soft limit; None without a limit) and bytes of /dev/shm (None where there is none)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    shared = None
    if os.path.isdir("/dev/shm"):
        status = os.statvfs("/dev/shm")
        shared = status.f_frsize * status.f_blocks
    return {"open_files": None if soft == resource.RLIM_INFINITY else soft, "shared_memory_bytes": shared}


def advise_limits(found: dict[str, int | None]) -> list[str]:
    """What to do about limits that are low."""
    advice = []
    files, shared = found["open_files"], found["shared_memory_bytes"]
    if files is not None and files < 1024:
        advice.append(f"only {files} open files are allowed; many ranks need more: ulimit -n 65536")
    if shared is not None and shared < 256e6:
        advice.append(
            f"/dev/shm holds only {shared / 1e6:.0f} MB; data loaders with worker processes may die with SIGBUS: "
            f"docker run --shm-size=2g"
        )
    return advice


def _can_bind(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
