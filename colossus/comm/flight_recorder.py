"""torch's flight recorder: the collectives that NCCL was given by this process, and which of them have not ended.

A collective on a GPU is over for the host before it has begun there, so the log of our own (`log`) says which rank did
not come to one, but not what the device does. torch's recorder asks the device; its files are read by ``torchfrtrace``.
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


def is_recording() -> bool:
    """Whether this process is one of ranks that talk through NCCL."""
    return dist.is_initialized() and dist.get_backend() == dist.Backend.NCCL


def write(path: Path, *, with_stacks: bool = True) -> None:
    """Write what was recorded to a file; readers see all of it or nothing.

    Args:
        with_stacks: with the lines that wanted each collective, which takes longer.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_bytes(_dump(with_stacks, only_active=False))
    draft.replace(path)


def has_pending() -> bool:
    """Whether some collective of this process has been given to NCCL and has not ended."""
    entries: list[dict[str, Any]] = pickle.loads(_dump(False, only_active=True)).get("entries", [])
    return any(entry.get("state") != "completed" and not entry.get("retired") for entry in entries)


def failed_group() -> tuple[str, str] | None:
    """(group, what torch calls the error) of the first group whose watchdog has given up a collective."""
    for group, (backend, _) in list(c10d._world.pg_map.items()):
        if backend != dist.Backend.NCCL:
            continue
        error = group._get_backend(torch.device("cuda")).get_error()
        if error != native.ErrorType.SUCCESS:
            return group.group_desc, error.name
    return None


def _dump(with_stacks: bool, *, only_active: bool) -> bytes:
    name = "_dump_nccl_trace" if hasattr(native, "_dump_nccl_trace") else "_dump_fr_trace"  # built without NCCL
    data: bytes = getattr(native, name)(True, with_stacks, only_active)
    return data
