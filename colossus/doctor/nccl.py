"""The environment that NCCL, CUDA and torch read, and what in it will make trouble. No torch."""

from __future__ import annotations

import difflib
import re
import socket
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from colossus.doctor import nccl_names as names

_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_SHOWN = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "GLOO_", "CUDA_", "NVIDIA_TF32_", *_ALLOCATOR)
_OFF = ("0", "false", "False", "no", "OFF", "off", "n", "N")
_LEVELS = ("VERSION", "WARN", "ABORT", "INFO", "TRACE", "NONE")
_INFINIBAND = Path("/sys/class/infiniband")

_NO_RECORDER = "the flight recorder is off: after a time-out nobody can say who is missing"
#: variable -> (its values that make trouble, None for all but those that switch it off; what they do and what to do)
_TROUBLE: dict[str, tuple[tuple[str, ...] | None, str]] = {
    "NCCL_P2P_DISABLE": (None, "devices of this machine talk through the host's memory: to find errors only"),
    "NCCL_SHM_DISABLE": (None, "devices that do not reach each other directly talk through the network"),
    "NCCL_ALGO": (None, "NCCL cannot choose for the size of each message: to find errors only"),
    "NCCL_PROTO": (None, "NCCL cannot choose for the size of each message; forced LL128 can corrupt data"),
    "NCCL_LAUNCH_MODE": (("GROUP",), "a mode of the past"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": (
        ("0", "2"),
        "a collective whose peer is gone would be waited for without end, or go on with what it has: unset it",
    ),
    "TORCH_NCCL_BLOCKING_WAIT": (None, "the host waits for every collective, and nothing overlaps: unset it"),
    "TORCH_NCCL_ENABLE_TIMING": (None, "each collective is timed, which costs and can hang: to find errors only"),
    "TORCH_FR_BUFFER_SIZE": (("0",), _NO_RECORDER),
    "TORCH_NCCL_TRACE_BUFFER_SIZE": (("0",), _NO_RECORDER),
    "CUDA_LAUNCH_BLOCKING": (None, "the host waits for every kernel, and nothing overlaps: to find errors only"),
    "NVIDIA_TF32_OVERRIDE": (("0", "1"), "it overrides what torch and the config say about TF32: unset it"),
}


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of this environment that concern NCCL and CUDA."""
    return {name: value for name, value in sorted(environ.items()) if name.startswith(_SHOWN)}


def advise_environment(environ: Mapping[str, str]) -> list[str]:
    """What in these variables will make trouble, and what to do."""
    found = settings(environ)
    return [*_troubles(found), *_interfaces(found), *_infiniband(found), *_values(found), *_slips(found)]


def _troubles(found: Mapping[str, str]) -> Iterator[str]:
    for name, (values, text) in _TROUBLE.items():
        old = name.removeprefix("TORCH_")
        known = old if old.removeprefix("NCCL_") in names.OLD_OF_TORCH and name not in found else name
        value = found.get(known, "").strip()
        if value and (value in values if values is not None else value not in _OFF):
            yield f"{known}={value}: {text}"
        elif known != name and value:
            yield f"{known} is now {name}: torch still reads it, and says so on every rank"


def _interfaces(found: Mapping[str, str]) -> Iterator[str]:
    """That the interfaces named exist: ``eth`` is a beginning, ``=eth0`` a name, ``^docker`` leaves out."""
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = found.get(name, "")
        exact = value.startswith("=") or name.startswith("GLOO")
        here = [interface for _, interface in socket.if_nameindex()]
        wanted = [each for each in value.lstrip("=").split(",") if each]
        if not wanted or value.startswith("^"):
            continue
        if not any(each == one if exact else each.startswith(one) for each in here for one in wanted):
            reader = name.partition("_")[0]
            yield f"{name}={value} names no interface of this machine ({', '.join(here)}): {reader} would not start"
        elif all(one in ("lo", "lo0") for one in wanted):
            yield f"{name}={value}: the loopback reaches no other machine"


def _infiniband(found: Mapping[str, str]) -> Iterator[str]:
    cards = sorted(path.name for path in _INFINIBAND.iterdir()) if _INFINIBAND.is_dir() else []
    value = found.get("NCCL_IB_DISABLE", "").strip()
    if cards and value and value not in _OFF:
        yield f"NCCL_IB_DISABLE={value}: {', '.join(cards)} would not be used, and machines talk through TCP"
    wanted = found.get("NCCL_IB_HCA", "")
    chosen = [each.partition(":")[0] for each in wanted.lstrip("=").split(",") if each]
    if chosen and not wanted.startswith("^") and not any(card.startswith(one) for card in cards for one in chosen):
        yield f"NCCL_IB_HCA={wanted} names no InfiniBand card of this machine ({', '.join(cards) or 'it has none'})"


def _values(found: Mapping[str, str]) -> Iterator[str]:
    """Values that are no values of their variable."""
    level = found.get("NCCL_DEBUG", "")
    if level.upper() in ("INFO", "TRACE") and "NCCL_DEBUG_FILE" not in found:
        yield f"NCCL_DEBUG={level}: every rank prints many lines; NCCL_DEBUG_FILE=nccl.%h.%p keeps them apart"
    elif level and level.upper() not in _LEVELS:
        yield f"NCCL_DEBUG={level}: must be one of {', '.join(_LEVELS[:-1])}"
    connections = found.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    if connections and not (connections.isdecimal() and 1 <= int(connections) <= 32):
        yield f"CUDA_DEVICE_MAX_CONNECTIONS={connections}: must be 1 to 32 (8 where it is not set)"
    elif connections == "1":
        yield (
            "CUDA_DEVICE_MAX_CONNECTIONS=1: kernels of all streams begin in the order in which they were launched; "
            "Megatron wants that for tensor parallelism, FSDP and ZeRO 3 lose by it: measure both"
        )
    heartbeat = found.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "")
    if heartbeat.isdecimal() and int(heartbeat) < 60:
        yield (
            f"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC={heartbeat}: a call of CUDA that takes as long ends the rank by "
            f"SIGABRT; comm.timeout_seconds is what ends collectives"
        )


def _slips(found: Mapping[str, str]) -> Iterator[str]:
    """Names that nobody reads."""
    for name in found:
        for prefix, known, others in (
            ("NCCL_", names.NCCL | names.OLD_OF_TORCH, names.OF_PLUGINS),
            ("TORCH_NCCL_", names.TORCH_NCCL, ()),
        ):
            rest = name.removeprefix(prefix)
            if name.startswith(prefix) and rest not in known and not rest.startswith(others):
                yield f"{name} is no variable that {_READERS[prefix]} documents{_meant(rest, known, prefix)}"
    for name in _ALLOCATOR:
        for key in re.findall(r"(?:^|,)\s*([A-Za-z0-9_]+)\s*:", re.sub(r"\[[^]]*\]", "", found.get(name, ""))):
            if key not in names.ALLOCATOR:
                yield f"{name}: {key!r} is no option of torch's allocator{_meant(key, names.ALLOCATOR)}"


_READERS = {"NCCL_": "NCCL", "TORCH_NCCL_": "torch"}


def _meant(name: str, known: Collection[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return f": did you mean {prefix}{close[0]}?" if close else ""
