"""``colossus doctor``: the equipment of this machine, the speed between its ranks, and likely problems."""

from __future__ import annotations

import os
import platform
import shutil
import sys

import torch

import colossus
from colossus import machine
from colossus.arithmetic import byte_count, counted
from colossus.doctor import environment, network
from colossus.doctor.devices import advise_devices, device_rows, examine_devices

DEFAULT_PORT = "29500"


def run(nproc: int = 2) -> int:
    """Print the report on this machine.

    Args:
        nproc: ranks to measure between.

    Returns:
        0, or 1 when the ranks cannot talk to each other at all.
    """
    rows, advice, can_talk = examine(nproc)
    print("\n".join(f"{name:<11} {value}" for name, value in rows), end="\n\n")
    print("\n".join(f"- {line}" for line in advice) or "no trouble in sight")
    return 0 if can_talk else 1


def examine(nproc: int) -> tuple[list[tuple[str, str]], list[str], bool]:
    """Return the lines of the report (name, value), the advice, and whether the ranks can talk to each other."""
    devices, cores, (total, free) = examine_devices(), machine.usable_cores(), machine.memory_bytes()
    gpus, files, (name, address) = len(devices["devices"]), machine.open_files(), network.resolve_own_name()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    stated_port = os.environ.get("MASTER_PORT", "")
    port = int(stated_port if stated_port.isdecimal() else DEFAULT_PORT)
    taken = network.port_is_taken(port)
    shared = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None
    cuda = gpus >= max(1, nproc)
    rows = [
        ("colossus", colossus.__version__),
        ("torch", torch.__version__),
        ("python", f"{platform.python_version()} on {platform.platform()}"),
        ("device", f"cuda ({gpus} here)" if gpus else "cpu"),
        *device_rows(devices),
        ("backend", "nccl" if cuda else "gloo"),
        *(("environment", f"{key}={value}") for key, value in environment.settings(os.environ).items()),
        ("cores", f"{cores} (OMP_NUM_THREADS {threads or 'not set: launch shares out the cores'})"),
        ("memory", byte_count(total) + (f", {byte_count(free)} free" if free is not None else "")),
        ("host name", f"{name} -> {address or 'does not resolve'}"),
        ("port", f"{port} {'taken' if taken else 'free'}"),
        ("open files", "no limit" if files is None else str(files)),
    ]
    between, trouble = _between_ranks(nproc, cuda)
    advice = [
        *_advise_cores(nproc, cores, gpus),
        *advise_devices(devices),
        *environment.advise_environment(os.environ),
        *network.advise_name(name, address),
        *(network.advise_port(port) if taken else ()),
        *network.advise_limits(files, shared),
        *([trouble] if trouble else []),
    ]
    return rows + between, advice, not trouble


def _between_ranks(nproc: int, cuda: bool) -> tuple[list[tuple[str, str]], str]:
    """Return the lines with the measurements between ranks, and the reason if there are none."""
    if nproc < 2:
        return [], ""
    sys.stdout.flush()  # forked ranks would print the buffer again
    try:
        measured = network.measure(nproc, cuda=cuda)
    except (OSError, RuntimeError) as error:
        why = str(error).partition("\n")[0]
        hint = f"GLOO_SOCKET_IFNAME={os.environ.get('GLOO_SOCKET_IFNAME', '')} may be wrong, or a firewall"
        return [(f"{nproc} ranks", f"cannot talk: {why}")], f"the ranks could not talk to each other ({why}): {hint}"
    small, large = (1e3 * measured[f"all_reduce_{size}_seconds"] for size in ("small", "large"))
    bus, sent = (measured[f"{name}_bytes_per_second"] / 1e9 for name in ("all_reduce", "send"))
    return [
        (f"{nproc} ranks", f"all-reduce 4 KB {small:.2f} ms"),
        ("", f"all-reduce 64 MB {large:.1f} ms, {bus:.2f} GB/s"),
        ("", f"send 4 KB {measured['send_small_seconds'] * 1e3:.2f} ms"),
        ("", f"send 64 MB {sent:.2f} GB/s"),
    ], ""


def _advise_cores(nproc: int, cores: int, gpus: int) -> list[str]:
    advice = []
    if not gpus and nproc > cores:
        advice.append(
            f"{nproc} ranks share {counted(cores, 'core')}: right for trying things out, slower than "
            f"{counted(cores, 'rank')}"
        )
    if 0 < gpus < nproc:
        advice.append(
            f"{nproc} ranks, but {counted(gpus, 'GPU')}: measured on CPUs with gloo; use --nproc {gpus} for the GPUs"
        )
    return advice
