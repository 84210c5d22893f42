"""The CUDA devices of this machine, as torch sees them, and problems that they will cause."""

from __future__ import annotations

import contextlib
import os
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from colossus.arithmetic import byte_count, counted
from colossus.context.visible_devices import VARIABLE, explain_visible

_DRIVER = Path("/proc/driver/nvidia/version")
_NODES = Path("/dev")


def examine_devices() -> dict[str, Any]:
    """Return the properties of devices, driver and NCCL.

    Returns:
        ``devices`` (a dict each), ``driver``, ``cuda`` and ``nccl`` (versions, None where unknown), and ``apart``: the
        pairs of devices that do not reach each other directly.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    reached = torch.cuda.can_device_access_peer
    return {
        "devices": [_device(index) for index in range(count)],
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "nccl": _nccl(),
        "apart": [pair for pair in combinations(range(count), 2) if not reached(*pair)],
    }


def device_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a line for each device, then one with the versions, for people."""
    rows = []
    for number, device in enumerate(report["devices"]):
        free = "cannot be used" if device["error"] else f"{byte_count(device['free_bytes'])} free"
        memory = f"{byte_count(device['memory_bytes'])} ({free})"
        rows.append((f"device {number}", f"{device['name']}, {memory}, compute capability {device['capability']}"))
    if rows:
        rows.append(("", f"driver {report['driver']}, CUDA {report['cuda']}, NCCL {report['nccl']}"))
    return rows


def advise_devices(report: dict[str, Any]) -> list[str]:
    """Return advice about these devices; empty when they will make no trouble."""
    devices, advice = report["devices"], []
    if not devices:
        return _advise_none()
    note = explain_visible(os.environ, len(devices))
    if note and not re.search(r" shows \d+$", note):
        advice.append(note)
    names = list(dict.fromkeys(device["name"] for device in devices))
    if len(names) > 1:
        advice.append(f"devices differ ({', '.join(names)}): every step takes as long as the slowest takes")
    for number, device in enumerate(devices):
        if device["error"] is not None:
            advice.append(f"device {number} cannot be used: {device['error']}")
            continue
        used = device["memory_bytes"] - device["free_bytes"]
        if used > 0.1 * device["memory_bytes"]:
            advice.append(f"{byte_count(used)} of device {number} are used by other processes: `nvidia-smi` names them")
    if report["apart"]:
        first, second = report["apart"][0]
        pairs = counted(len(report["apart"]), "such pair")
        advice.append(
            f"devices {first} and {second} do not reach each other directly ({pairs}): their messages "
            f"go through the host's memory. Virtual machines and IOMMU (ACS) are possible causes"
        )
    return advice


def _advise_none() -> list[str]:
    count = len(list(_NODES.glob("nvidia[0-9]*")))
    if not count:
        return []
    if os.environ.get(VARIABLE) is not None:
        return [explain_visible(os.environ, 0)]
    return [
        f"this machine has {counted(count, 'NVIDIA device')}, but torch {torch.__version__} (CUDA "
        f"{torch.version.cuda}) cannot use them: is it built with CUDA, and does the driver ({_driver()}) support that "
        f"version? Run `nvidia-smi`"
    ]


def _device(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    error = None
    try:
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as failure:  # another process owns it exclusively, or it is broken
        free, total, error = None, properties.total_memory, str(failure).partition("\n")[0]
    return {
        "name": properties.name,
        "memory_bytes": total,
        "free_bytes": free,
        "error": error,
        "capability": f"{properties.major}.{properties.minor}",
    }


def _driver() -> str | None:
    with contextlib.suppress(OSError):
        match = re.search(r"(?:Kernel Module.*?|x86_64|aarch64)\s+(\d+\.\d[\d.]*)", _DRIVER.read_text())
        return match[1] if match else None
    return None


def _nccl() -> str | None:
    with contextlib.suppress(Exception):  # torch may be built without NCCL
        return ".".join(map(str, torch.cuda.nccl.version()))
    return None
