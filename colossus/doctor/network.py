"""Host name, port and speed between ranks of this machine, and their problems for distributed runs."""

from __future__ import annotations

import errno
import socket
import sys
from functools import partial
from typing import Any

import torch
from torch import distributed as dist

from colossus import machine
from colossus.comm.accounting import sent
from colossus.comm.links import Links
from colossus.context.groups import AxisGroup
from colossus.context.local_ranks import run_local_ranks
from colossus.doctor.rank_timing import CALLS, seconds_together, there_and_back

SMALL_BYTES = 4 * 1024
LARGE_BYTES = 64 * 1024 * 1024


def resolve_own_name() -> tuple[str, str | None]:
    """Return this machine's host name, and the address that it resolves to, None where it does not."""
    name = socket.gethostname()
    try:
        return name, str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return name, None


def advise_name(name: str, address: str | None) -> list[str]:
    """Return advice about this host name; empty when it will make no trouble."""
    if address is None:
        return [
            f"the host name {name!r} does not resolve: runs on this machine alone use the loopback and work; for "
            f"runs over several machines add it to /etc/hosts with the address of the network card"
        ]
    resolved = f"the host name {name!r} resolves to {address}"
    if error_of_bind(address, 0):
        return [f"{resolved}, which is not an address of this machine: correct /etc/hosts, or set GLOO_SOCKET_IFNAME"]
    if machine.is_loopback(address):
        return [
            f"{resolved}, the loopback: fine on one machine, and with several under `colossus launch`; torchrun and "
            f"srun need MASTER_ADDR to be a network address, and GLOO_SOCKET_IFNAME the network card's name"
        ]
    return []


def error_of_bind(address: str, port: int) -> int:
    """Return the `errno` of binding a TCP socket here; 0 where it succeeds."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free for a new run
        try:
            probe.bind((address, port))
        except OSError as error:
            return error.errno or errno.EIO
    return 0


def port_is_taken(port: int) -> bool:
    """Return whether a process listens on (or owns) this TCP port here."""
    return error_of_bind("", port) == errno.EADDRINUSE


def advise_port(port: int) -> list[str]:
    """Return advice about a taken port of torchrun's rendezvous."""
    return [
        f"port {port} is taken by another process: ranks that torchrun or srun starts would connect to that process "
        f"and hang; set MASTER_PORT to a free port. `colossus launch` on one machine picks a free port itself"
    ]


def advise_limits(files: int | None, shared: int | None) -> list[str]:
    """Return advice about few open files, and little shared memory (bytes of /dev/shm)."""
    advice = []
    if files is not None and files < machine.FEW_OPEN_FILES:
        advice.append(f"only {files} open files are allowed; many ranks need more: ulimit -n 65536")
    if shared is not None and shared < 256e6:
        advice.append(f"/dev/shm holds only {shared / 1e6:.0f} MB; data workers may die: docker run --shm-size=2g")
    return advice


# -- speed ----------------------------------------------------------------------------------------------------


def measure(nproc: int, *, cuda: bool = False, timeout: float = 60.0) -> dict[str, float]:
    """Return seconds and bytes per second between ``nproc`` ranks, at least 2, on this machine.

    Returns:
        ``all_reduce_small_seconds`` (4 KB), ``all_reduce_large_seconds`` (64 MB) and its bus bandwidth
        ``all_reduce_bytes_per_second`` (2 (n-1)/n of the size over the time), ``send_small_seconds`` (one way) and
        ``send_bytes_per_second`` between ranks 0 and 1.

    Raises:
        RanksFailed: ranks fail, or nothing moves for ``timeout`` seconds.
    """
    return dict(run_local_ranks(nproc, partial(_rank, nproc, cuda), **rank_options(cuda, timeout))[0])


def rank_options(cuda: bool, timeout: float) -> dict[str, Any]:
    """Return the options with which `run_local_ranks` starts and ends ranks on these devices."""
    return dict(
        # fork needs no second import of torch, but neither CUDA nor macOS allows it
        start="spawn" if cuda or sys.platform == "darwin" else "fork",
        backend="nccl" if cuda else "gloo",
        patience=timeout,
        # a rank that waits for CUDA spins, which does not look like silence: there NCCL's watchdog must end it
        collective_timeout=timeout if cuda else None,
    )


def _rank(nproc: int, cuda: bool, rank: int) -> dict[str, float]:
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    group = AxisGroup(("ranks",), tuple(range(nproc)), rank, dist.group.WORLD)
    links = Links(group, [(0, 1), (1, 0)], device)
    seconds = {}
    for name, size, calls in (("small", SMALL_BYTES, 50), ("large", LARGE_BYTES, 3)):
        x = torch.zeros(size // 4, device=device)
        seconds[f"all_reduce_{name}"] = seconds_together(partial(CALLS["all_reduce"], x, group), calls, device)
        seconds[f"send_{name}"] = seconds_together(partial(there_and_back, links, x, index=rank), calls, device) / 2
    moved = sent("all_reduce", nproc, LARGE_BYTES)
    return {
        "all_reduce_small_seconds": seconds["all_reduce_small"],
        "all_reduce_large_seconds": seconds["all_reduce_large"],
        "all_reduce_bytes_per_second": moved / seconds["all_reduce_large"],
        "send_small_seconds": seconds["send_small"],
        "send_bytes_per_second": LARGE_BYTES / seconds["send_large"],
    }
