"""The CUDA devices of this machine, as torch sees them, and what will make trouble."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from colossus.context.visible_devices import VARIABLE, explain_visible
from colossus.machine import gigabytes

_DRIVER = Path("/proc/driver/nvidia/version")
_NODES = Path("/dev")


def examine_devices() -> dict[str, Any]:
    """What is known of devices, driver and NCCL, JSON-able.

    Returns:
        ``devices`` (a dict each), ``driver``, ``cuda`` and ``nccl`` (versions, None where unknown), and ``peers``: by
        device which others it reaches directly.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    reached = torch.cuda.can_device_access_peer
    return {
        "devices": [_device(index) for index in range(count)],
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "nccl": _nccl(),
        "peers": [
            [other for other in range(count) if other != index and reached(index, other)] for index in range(count)
        ],
    }


def device_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """For people: a line for each device, then what joins them."""
    rows = []
    for number, device in enumerate(found["devices"]):
        free = "cannot be used" if device["error"] else f"{gigabytes(device['free_bytes'])} free"
        memory = f"{gigabytes(device['memory_bytes'])} ({free})"
        rows.append((f"device {number}", f"{device['name']}, {memory}, compute capability {device['capability']}"))
    if rows:
        names = (("driver", "driver"), ("CUDA", "cuda"), ("NCCL", "nccl"))
        rows.append(("", ", ".join(f"{what} {found[key]}" for what, key in names if found[key])))
    count = len(found["devices"])
    if count > 1:
        pairs, apart = count * (count - 1) // 2, len(_unreached(found["peers"]))
        rows.append(("peer access", f"between {pairs - apart} of {pairs} pairs"))
    return rows


def advise_devices(found: dict[str, Any]) -> list[str]:
    """What to do about these devices; empty when they will make no trouble."""
    devices, advice = found["devices"], []
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
            advice.append(f"{gigabytes(used)} of device {number} are used by other processes: `nvidia-smi` names them")
    apart = _unreached(found["peers"])
    if apart:
        advice.append(
            f"devices {apart[0][0]} and {apart[0][1]} do not reach each other directly (of {len(apart)} pair(s)): what "
            f"they send goes through the host's memory. Virtual machines and IOMMU (ACS) cause it, too"
        )
    return advice


def _advise_none() -> list[str]:
    nodes = sorted(path.name for path in _NODES.glob("nvidia[0-9]*"))
    if os.environ.get(VARIABLE) is not None:
        return [explain_visible(os.environ, 0)] if nodes or torch.version.cuda else []
    if not nodes:
        return []
    here = f"this machine has {len(nodes)} NVIDIA device(s), but torch"
    if torch.version.cuda is None:
        return [f"{here} {torch.__version__} is built without CUDA"]
    return [
        f"{here} cannot use them: is the driver ({_driver()}) one for CUDA {torch.version.cuda}? `nvidia-smi` shows "
        f"which it supports"
    ]


def _device(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    error = None
    try:
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as failure:  # another process has it for itself, or it is broken
        free, total, error = None, properties.total_memory, str(failure).partition("\n")[0]
    return {
        "name": properties.name,
        "uuid": str(getattr(properties, "uuid", "")) or None,
        "memory_bytes": total,
        "free_bytes": free,
        "error": error,
        "capability": f"{properties.major}.{properties.minor}",
    }


def _unreached(peers: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    count = len(peers)
    return [(one, other) for one in range(count) for other in range(one + 1, count) if other not in peers[one]]


def _driver() -> str | None:
    with contextlib.suppress(OSError):
        match = re.search(r"(?:Kernel Module.*?|x86_64|aarch64)\s+(\d+\.\d[\d.]*)", _DRIVER.read_text())
        return match[1] if match else None
    return None


def _nccl() -> str | None:
    with contextlib.suppress(Exception):  # not built with it
        return ".".join(map(str, torch.cuda.nccl.version()))
    return None
