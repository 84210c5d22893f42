"""That no two ranks compute on one device, where NCCL would refuse it in its own words or hang."""

from __future__ import annotations

import torch
from torch import distributed as dist

from colossus.context.visible_devices import VARIABLE


def require_own_device(store: dist.Store, rank: int, device: torch.device) -> None:
    """Claim the device for this rank.

    Args:
        store: of all ranks, before NCCL is told of them.

    Raises:
        ValueError: on the second rank that claims it.
    """
    found = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if found is None:
        return
    owner = store.compare_set(f"device/{found}", "", str(rank)).decode()
    if owner != str(rank):
        raise ValueError(
            f"ranks {owner} and {rank} are on the same device (GPU-{found}), which NCCL refuses: give each rank a "
            f"device of its own (what sets {VARIABLE} for the ranks, or --gpus-per-task of srun?), start fewer "
            f"ranks, or use comm.backend='gloo', under which ranks may share one"
        )
