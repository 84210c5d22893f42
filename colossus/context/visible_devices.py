"""``CUDA_VISIBLE_DEVICES`` in words: what it shows, and why it shows fewer devices than somebody meant. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping

VARIABLE = "CUDA_VISIBLE_DEVICES"
_HIDES_ALL = "NoDevFiles"
#: set where SLURM gives each task devices of its own, which the task then counts from 0
_OF_TASKS = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPU_BIND")


def explain_visible(environ: Mapping[str, str], found: int) -> str:
    """A clause on what the variable does here, empty where it is not set.

    CUDA reads a list of numbers or of ids (``GPU-...``, ``MIG-...``, of which a beginning is enough), stops at the
    first entry that names no device, shows none where one is named twice, and of MIG instances shows the first only.

    Args:
        found: devices that torch finds.
    """
    value = environ.get(VARIABLE)
    if value is None:
        return ""
    setting = f"{VARIABLE}={value}"
    entries = [entry.strip() for entry in value.split(",")]
    if not value.strip():
        return f"{VARIABLE} is set to nothing, which hides all devices: unset it"
    if entries[0] == _HIDES_ALL or re.fullmatch(r"-\d+", entries[0]):
        return f"{setting} hides all devices: unset it, or name some ({VARIABLE}=0,1)"
    prefix = next((each for each in ("GPU-", "MIG-") if entries[0].startswith(each)), "")
    for number, entry in enumerate(entries):
        if entry in entries[:number]:
            return f"{setting} names {entry} twice, and then CUDA shows no device"
        if not _is_device(entry, prefix):
            hidden = "all devices" if number == 0 else f"all after the first {number}" if number > 1 else "all but one"
            kind = f"an id that begins with {prefix}" if prefix else "the number of a device"
            return f"{setting}: {entry!r} is not {kind}, which hides {hidden}"
    if prefix == "MIG-" and len(entries) > 1:
        return f"{setting}: of MIG instances CUDA shows one process the first only"
    if len(entries) > found:
        names = "1 device" if len(entries) == 1 else f"{len(entries)} devices"
        return f"{setting} names {names}, and CUDA stops at the first that is not there"
    return f"{setting} shows {len(entries)}"


def may_be_of_one_rank(environ: Mapping[str, str]) -> bool:
    """Whether the one device that a rank sees may be its own, and not that of its neighbours, too: SLURM or a script
    around the ranks shows each of them another."""
    return any(environ.get(name) for name in _OF_TASKS) or bool(environ.get(VARIABLE))


def _is_device(entry: str, prefix: str) -> bool:
    return entry.startswith(prefix) and len(entry) > len(prefix) if prefix else re.match(r"\+?\d", entry) is not None


def counted(devices: int) -> str:
    """``1 CUDA device``, ``2 CUDA devices``."""
    return f"{devices or 'no'} CUDA device{'s' * (devices != 1)}"
