"""Dumps of torch's flight recorder: the collectives that this process queued in NCCL, and which have not ended.

For the host, a collective on a GPU is over before it has begun on the device. So our own log (`log`) says which rank
did not come to a collective, but not what the device does. torch's recorder asks the device; ``torchfrtrace`` reads
its files.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch._C import _distributed_c10d as native
from torch.distributed import distributed_c10d as c10d

from colossus.context.groups import uses


def is_recording() -> bool:
    """Return whether the ranks of this process's run communicate through NCCL."""
    return dist.is_initialized() and uses(dist.Backend.NCCL)


def write(path: Path, *, with_stacks: bool = True) -> None:
    """Write the recording to a file; readers see all of it or nothing.

    Args:
        with_stacks: include the stack of each collective's caller, which takes longer.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_bytes(_dump(with_stacks, only_active=False))
    draft.replace(path)


def has_pending() -> bool:
    """Return whether a collective that this process queued in NCCL has not ended."""
    entries: list[dict[str, Any]] = pickle.loads(_dump(False, only_active=True)).get("entries", [])
    return any(entry.get("state") != "completed" and not entry.get("retired") for entry in entries)


def failed_group() -> tuple[str, str] | None:
    """Return the name of the first group whose watchdog gave up a collective, and torch's name of the error."""
    for group in list(c10d._world.pg_map):
        if not uses(dist.Backend.NCCL, group):
            continue
        error = group._get_backend(torch.device("cuda")).get_error()
        if error != native.ErrorType.SUCCESS:
            return group.group_desc, error.name
    return None


def _dump(with_stacks: bool, *, only_active: bool) -> bytes:
    # a torch that is built without NCCL has the second name only
    name = "_dump_nccl_trace" if hasattr(native, "_dump_nccl_trace") else "_dump_fr_trace"
    data: bytes = getattr(native, name)(True, with_stacks, only_active)
    return data
