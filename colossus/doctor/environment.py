"""The environment that NCCL, CUDA, gloo and torch read, and settings in it that will make trouble. No torch."""

from __future__ import annotations

from collections.abc import Mapping

_SHOWN = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "GLOO_", "CUDA_", "NVIDIA_TF32_", "PYTORCH_CUDA_ALLOC", "PYTORCH_ALLOC")
_OFF = ("", "0", "false", "no", "off", "n")

#: a variable -> its effect, and advice
_TROUBLE = {
    "NCCL_P2P_DISABLE": "devices of this machine exchange data through the host's memory: use it only to find errors",
    "NCCL_IB_DISABLE": "machines use TCP, even where there is InfiniBand",
    "NCCL_PROTO": "NCCL cannot choose for the size of each message; forced LL128 can corrupt data",
    "TORCH_NCCL_BLOCKING_WAIT": "the host waits for every collective, and nothing overlaps: unset it",
    "CUDA_LAUNCH_BLOCKING": "the host waits for every kernel, and nothing overlaps: use it only to find errors",
}


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this environment that concern NCCL and CUDA."""
    return {name: value for name, value in sorted(environ.items()) if name.startswith(_SHOWN)}


def advise_environment(environ: Mapping[str, str]) -> list[str]:
    """Return the problems that these variables will cause, with advice."""
    on = [(name, environ.get(name, "")) for name in _TROUBLE]
    advice = [f"{name}={value}: {_TROUBLE[name]}" for name, value in on if value.strip().lower() not in _OFF]
    if environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") in ("0", "2"):
        advice.append(
            "TORCH_NCCL_ASYNC_ERROR_HANDLING: ranks wait forever for a collective whose peer is gone: unset it"
        )
    return advice
