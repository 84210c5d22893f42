"""``CUDA_VISIBLE_DEVICES`` in words. No torch."""

from __future__ import annotations

from collections.abc import Mapping

VARIABLE = "CUDA_VISIBLE_DEVICES"
#: SLURM sets one of these where each task has devices of its own, which the task then counts from 0
_OF_TASKS = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPU_BIND")


def explain_visible(environ: Mapping[str, str], num_devices: int) -> str:
    """Return a clause on the effect of the variable here, empty where it is not set.

    Args:
        num_devices: number of devices that torch finds.
    """
    value = environ.get(VARIABLE)
    if value is None:
        return ""
    named = value.split(",")
    if not value.strip() or named[0].strip().startswith("-"):
        return f"{VARIABLE}={value} hides all devices: unset it, or name some ({VARIABLE}=0,1)"
    if len(named) > num_devices:
        return (
            f"{VARIABLE}={value} names {len(named)}, but CUDA shows {num_devices}: it stops at the first missing "
            f"device, shows none if one is named twice, and only one MIG instance to a process"
        )
    return f"{VARIABLE}={value} shows {num_devices}"


def may_be_of_one_rank(environ: Mapping[str, str]) -> bool:
    """Return whether the only visible device may belong to this rank alone.

    SLURM, or a script around the ranks, may show another device to each of them.
    """
    return any(environ.get(name) for name in (*_OF_TASKS, VARIABLE))


def counted_devices(devices: int) -> str:
    """Return ``1 CUDA device``, ``2 CUDA devices``."""
    return f"{devices or 'no'} CUDA device{'s' * (devices != 1)}"
