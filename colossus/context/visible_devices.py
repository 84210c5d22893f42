"""``CUDA_VISIBLE_DEVICES`` in words. No torch."""

from __future__ import annotations

from collections.abc import Mapping

VARIABLE = "CUDA_VISIBLE_DEVICES"
#: set where SLURM gives each task devices of its own, which the task then counts from 0
_OF_TASKS = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPU_BIND")


def explain_visible(environ: Mapping[str, str], found: int) -> str:
    """A clause on what the variable does here, empty where it is not set.

    Args:
        found: devices that torch finds.
    """
    value = environ.get(VARIABLE)
    if value is None:
        return ""
    named = value.split(",")
    if not value.strip() or named[0].strip().startswith("-"):
        return f"{VARIABLE}={value} hides all devices: unset it, or name some ({VARIABLE}=0,1)"
    if len(named) > found:
        return (
            f"{VARIABLE}={value} names {len(named)}, of which CUDA shows {found}: it stops at the first that is not "
            f"there, shows none where one is named twice, and one MIG instance to a process"
        )
    return f"{VARIABLE}={value} shows {found}"


def may_be_of_one_rank(environ: Mapping[str, str]) -> bool:
    """Whether the one device that a rank sees may be its own, and not that of its neighbours, too: SLURM or a script
    around the ranks shows each of them another.
    """
    return any(environ.get(name) for name in (*_OF_TASKS, VARIABLE))


def counted(devices: int) -> str:
    """``1 CUDA device``, ``2 CUDA devices``."""
    return f"{devices or 'no'} CUDA device{'s' * (devices != 1)}"
