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
_CONNECTIVITY = "_detect_dma_connectivity"


def examine_devices() -> dict[str, Any]:
    """What is known of devices, driver and NCCL, JSON-able.

    Returns:
        ``devices`` (a dict each), ``driver``, ``cuda`` and ``nccl`` (versions, None where unknown), ``peers``: by
        device which others it reaches directly, and ``nvlinks``: the same by NVLink, None where torch does not say.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "devices": [_device(index) for index in range(count)],
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "nccl": _nccl(),
        "peers": [_peers(index, count) for index in range(count)],
        "nvlinks": _nvlinks(count),
    }


def device_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """For people: a line for each device, then what joins them."""
    lines = [
        (
            f"device {number}",
            f"{device['name']}, {gigabytes(device['memory_bytes'])} ({_free(device)}), compute capability "
            f"{device['capability']}",
        )
        for number, device in enumerate(found["devices"])
    ]
    versions = [f"{what} {found[key]}" for what, key in _VERSIONS if found[key]]
    lines += [("", ", ".join(versions))] if found["devices"] else []
    if len(found["devices"]) > 1:
        links = found["nvlinks"]
        by_nvlink = f"; by NVLink {_pairs(links)}" if links is not None else ""
        lines.append(("peer access", f"{_pairs(found['peers'])}{by_nvlink}"))
    return lines


_VERSIONS = (("driver", "driver"), ("CUDA", "cuda"), ("NCCL", "nccl"))


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
        if not device["is_supported"]:
            advice.append(
                f"device {number} has compute capability {device['capability']}, for which this build of torch has no "
                f"kernels ({', '.join(torch.cuda.get_arch_list())}): install a build that has"
            )
    apart = _unreached(found["peers"])
    if apart:
        advice.append(
            f"devices {apart[0][0]} and {apart[0][1]} do not reach each other directly (of {len(apart)} pair(s)): what "
            f"they send goes through the host's memory. Virtual machines and IOMMU (ACS) cause it, too"
        )
    return advice


def _free(device: dict[str, Any]) -> str:
    return f"{gigabytes(device['free_bytes'])} free" if device["error"] is None else "cannot be used"


def _advise_none() -> list[str]:
    nodes = sorted(path.name for path in _NODES.glob("nvidia[0-9]*"))
    if os.environ.get(VARIABLE) is not None:
        return [explain_visible(os.environ, 0)] if nodes or torch.version.cuda else []
    if not nodes:
        return []
    if torch.version.cuda is None:
        return [f"this machine has {len(nodes)} NVIDIA device(s), but torch {torch.__version__} is built without CUDA"]
    return [
        f"this machine has {len(nodes)} NVIDIA device(s), but torch cannot use them: is the driver ({_driver()}) one "
        f"for CUDA {torch.version.cuda}? `nvidia-smi` shows which it supports"
    ]


def _device(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    error = None
    try:
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as failure:  # another process has it for itself, or it is broken
        free, total, error = None, properties.total_memory, str(failure).partition("\n")[0]
    major, minor = properties.major, properties.minor
    return {
        "name": properties.name,
        "uuid": str(getattr(properties, "uuid", "")) or None,
        "memory_bytes": total,
        "free_bytes": free,
        "error": error,
        "capability": f"{major}.{minor}",
        "multiprocessors": properties.multi_processor_count,
        "is_supported": _is_supported(major, minor, torch.cuda.get_arch_list()),
    }


def _is_supported(major: int, minor: int, architectures: Sequence[str]) -> bool:
    """Binaries (sm) run on the same major version from their minor on, PTX (compute) on all that are newer."""
    for text in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", text)
        if match is None:
            continue
        built = int(match[2]), int(match[3])
        if match[1] == "compute" and built <= (major, minor):
            return True
        if built[0] == major and built[1] <= minor and (not match[4] or built[1] == minor):
            return True
    return not architectures


def _peers(index: int, count: int) -> list[int]:
    return [other for other in range(count) if other != index and torch.cuda.can_device_access_peer(index, other)]


def _nvlinks(count: int) -> list[list[int]] | None:
    """By device, the others to which NVLink leads."""
    if count < 2:
        return None
    with contextlib.suppress(Exception):  # private, and needs the driver's management library
        from torch._C import _distributed_c10d as native

        found = getattr(native, _CONNECTIVITY)(torch._C._autograd.DeviceType.CUDA, "nvlink").matrix
        return [[other for other, links in enumerate(row) if links and other != here] for here, row in enumerate(found)]
    return None


def _unreached(peers: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    count = len(peers)
    return [(one, other) for one in range(count) for other in range(one + 1, count) if other not in peers[one]]


def _pairs(reached: Sequence[Sequence[int]]) -> str:
    pairs, apart = len(reached) * (len(reached) - 1) // 2, len(_unreached(reached))
    return (
        "between all"
        if not apart
        else "between none"
        if apart == pairs
        else f"between {pairs - apart} of {pairs} pairs"
    )


def _driver() -> str | None:
    with contextlib.suppress(OSError):
        match = re.search(r"(?:Kernel Module.*?|x86_64|aarch64)\s+(\d+\.\d[\d.]*)", _DRIVER.read_text())
        return match[1] if match else None
    return None


def _nccl() -> str | None:
    with contextlib.suppress(Exception):  # not built with it
        return ".".join(map(str, torch.cuda.nccl.version()))
    return None
