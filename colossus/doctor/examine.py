"""``colossus doctor``: what this machine has, how fast its ranks talk, and what will make trouble."""

from __future__ import annotations

import json as json_module
import os
import platform
import sys
from typing import Any

import torch

import colossus
from colossus.doctor import nccl, network
from colossus.doctor.devices import advise_devices, device_rows, examine_devices
from colossus.machine import gigabytes, memory_bytes, usable_cores

DEFAULT_PORT = "29500"


def run(nproc: int = 2, json: bool = False) -> int:
    """Print what was examined, as text or as one JSON object.

    Args:
        nproc: ranks to measure between.

    Returns:
        0, or 1 when the ranks cannot talk to each other at all.
    """
    found = examine(nproc)
    print(json_module.dumps(found, indent=2) if json else render(found))
    return 0 if "error" not in found["between_ranks"] else 1


def examine(nproc: int) -> dict[str, Any]:
    """Everything ``doctor`` finds out, JSON-able; ``advice`` is a list of sentences."""
    cores, (total, available), limits = usable_cores(), memory_bytes(), network.limits()
    given = os.environ.get("MASTER_PORT", "")
    port = int(given if given.isdecimal() else DEFAULT_PORT)
    taken = network.port_is_taken(port)
    name, address = network.resolve_own_name()
    devices = examine_devices()
    gpus = len(devices["devices"])
    cuda = gpus >= max(1, nproc)
    between = _between_ranks(nproc, cuda)
    return {
        "versions": {
            "colossus": colossus.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
        },
        "device": "cuda" if gpus else "cpu",
        **devices,
        "environment": nccl.settings(os.environ),
        "backend": "nccl" if cuda else "gloo",
        "cores": cores,
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "memory_bytes": total,
        "memory_available_bytes": available,
        "host_name": name,
        "host_address": address,
        "port": port,
        "port_taken": taken,
        **limits,
        "nproc": nproc,
        "between_ranks": between,
        "advice": [
            *_advise_cores(nproc, cores, gpus),
            *advise_devices(devices),
            *nccl.advise_environment(os.environ),
            *network.advise_name(name, address),
            *network.advise_port(port, taken),
            *network.advise_limits(limits),
            *_advise_speed(between),
        ],
    }


def render(found: dict[str, Any]) -> str:
    """The examination as aligned lines with the advice below."""
    versions = found["versions"]
    threads = found["omp_num_threads"] or "not set: launch shares out the cores"
    free = found["memory_available_bytes"]
    rows = [
        ("colossus", versions["colossus"]),
        ("torch", versions["torch"]),
        ("python", f"{versions['python']} on {versions['platform']}"),
        ("device", found["device"] + (f" ({len(found['devices'])} here)" if found["devices"] else "")),
        *device_rows(found),
        ("backend", found["backend"]),
        *((("environment" if not n else "", f"{k}={v}") for n, (k, v) in enumerate(found["environment"].items()))),
        ("cores", f"{found['cores']} (OMP_NUM_THREADS {threads})"),
        ("memory", gigabytes(found["memory_bytes"]) + (f", {gigabytes(free)} free" if free is not None else "")),
        ("host name", f"{found['host_name']} -> {found['host_address'] or 'does not resolve'}"),
        ("port", f"{found['port']} {'taken' if found['port_taken'] else 'free'}"),
        ("open files", "no limit" if found["open_files"] is None else str(found["open_files"])),
    ]
    between = found["between_ranks"]
    ranks = f"{found['nproc']} ranks"
    if "error" in between:
        rows.append((ranks, f"cannot talk: {between['error']}"))
    elif between:
        bus = between["all_reduce_bytes_per_second"]
        rows += [
            (ranks, f"all-reduce 4 KB {between['all_reduce_small_seconds'] * 1e3:.2f} ms"),
            ("", f"all-reduce 64 MB {between['all_reduce_large_seconds'] * 1e3:.1f} ms, {bus / 1e9:.2f} GB/s"),
            ("", f"send 4 KB {between['send_small_seconds'] * 1e3:.2f} ms"),
            ("", f"send 64 MB {between['send_bytes_per_second'] / 1e9:.2f} GB/s"),
        ]
    lines = [f"{name:<11} {value}" for name, value in rows]
    advice = [f"- {line}" for line in found["advice"]] or ["no trouble in sight"]
    return "\n".join([*lines, "", *advice])


def _between_ranks(nproc: int, cuda: bool) -> dict[str, Any]:
    if nproc < 2:
        return {}
    sys.stdout.flush()  # what is buffered would be printed again by forked ranks
    try:
        return dict(network.measure(nproc, cuda=cuda))
    except (OSError, RuntimeError) as error:
        lines = str(error).splitlines()  # of a rank that has failed its traceback, too
        return {"error": ": ".join(dict.fromkeys([lines[0], lines[-1]]))}


def _advise_cores(nproc: int, cores: int, gpus: int) -> list[str]:
    advice = []
    if not gpus and nproc > cores:
        advice.append(f"{nproc} ranks share {cores} core(s): right for trying things out, slower than {cores} rank(s)")
    if 0 < gpus < nproc:
        advice.append(f"{nproc} ranks, but {gpus} GPU(s): measured on CPUs with gloo; use --nproc {gpus} for the GPUs")
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if not gpus and threads.isdecimal() and int(threads) * nproc > max(cores, nproc):
        advice.append(
            f"OMP_NUM_THREADS={threads} x {nproc} ranks is more than {cores} core(s): they will wait for each other; "
            f"unset it, and launch shares out the cores"
        )
    return advice


def _advise_speed(between: dict[str, Any]) -> list[str]:
    if "error" in between:
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        hint = f"GLOO_SOCKET_IFNAME={interface} may be wrong" if interface else "a firewall on the loopback?"
        return [f"the ranks could not talk to each other ({between['error']}): {hint}"]
    return []
