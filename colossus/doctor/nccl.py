"""The environment that NCCL, CUDA and torch read, and what in it will make trouble. No torch."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

_SHOWN = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "GLOO_", "CUDA_", "NVIDIA_TF32_", "PYTORCH_CUDA_ALLOC", "PYTORCH_ALLOC")
_OFF = ("", "0", "false", "no", "off", "n")
_INFINIBAND = Path("/sys/class/infiniband")

#: variable -> (its values that make trouble, None for all but those that switch it off; what they do and what to do)
_TROUBLE: dict[str, tuple[tuple[str, ...] | None, str]] = {
    "NCCL_P2P_DISABLE": (None, "devices of this machine talk through the host's memory: to find errors only"),
    "NCCL_SHM_DISABLE": (None, "devices that do not reach each other directly talk through the network"),
    "NCCL_ALGO": (None, "NCCL cannot choose for the size of each message: to find errors only"),
    "NCCL_PROTO": (None, "NCCL cannot choose for the size of each message; forced LL128 can corrupt data"),
    "NCCL_DEBUG": (("INFO", "TRACE"), "every rank prints many lines; NCCL_DEBUG_FILE=nccl.%h.%p keeps them apart"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": (
        ("0", "2"),
        "a collective whose peer is gone would be waited for without end, or go on with what it has: unset it",
    ),
    "TORCH_NCCL_BLOCKING_WAIT": (None, "the host waits for every collective, and nothing overlaps: unset it"),
    "TORCH_FR_BUFFER_SIZE": (("0",), "the flight recorder is off: after a time-out nobody can say who is missing"),
    "CUDA_LAUNCH_BLOCKING": (None, "the host waits for every kernel, and nothing overlaps: to find errors only"),
    "CUDA_DEVICE_MAX_CONNECTIONS": (
        ("1",),
        "kernels of all streams begin in the order in which they were launched; Megatron wants that for tensor "
        "parallelism, FSDP and ZeRO 3 lose by it: measure both",
    ),
    "NVIDIA_TF32_OVERRIDE": (("0", "1"), "it overrides what torch and the config say about TF32: unset it"),
}


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of this environment that concern NCCL and CUDA."""
    return {name: value for name, value in sorted(environ.items()) if name.startswith(_SHOWN)}


def advise_environment(environ: Mapping[str, str]) -> list[str]:
    """What in these variables will make trouble, and what to do."""
    advice = []
    for name, (values, text) in _TROUBLE.items():
        value = environ.get(name, "").strip()
        if value.upper() in values if values is not None else value.lower() not in _OFF:
            advice.append(f"{name}={value}: {text}")
    return [*advice, *_interfaces(environ), *_infiniband(environ)]


def _interfaces(environ: Mapping[str, str]) -> Iterator[str]:
    """That the interfaces named exist: ``eth`` is a beginning, ``=eth0`` a name, ``^docker`` leaves out."""
    here = [interface for _, interface in socket.if_nameindex()]
    for reader in ("NCCL", "GLOO"):
        name, value = f"{reader}_SOCKET_IFNAME", environ.get(f"{reader}_SOCKET_IFNAME", "")
        is_exact = value.startswith("=") or reader == "GLOO"
        wanted = [each for each in value.lstrip("=").split(",") if each]
        if not wanted or value.startswith("^"):
            continue
        if not any(each == one if is_exact else each.startswith(one) for each in here for one in wanted):
            yield f"{name}={value} names no interface of this machine ({', '.join(here)}): {reader} would not start"
        elif all(one in ("lo", "lo0") for one in wanted):
            yield f"{name}={value}: the loopback reaches no other machine"


def _infiniband(environ: Mapping[str, str]) -> Iterator[str]:
    cards = sorted(path.name for path in _INFINIBAND.iterdir()) if _INFINIBAND.is_dir() else []
    value = environ.get("NCCL_IB_DISABLE", "").strip()
    if cards and value.lower() not in _OFF:
        yield f"NCCL_IB_DISABLE={value}: {', '.join(cards)} would not be used, and machines talk through TCP"
