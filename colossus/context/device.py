"""Which device a rank computes on, and that no two ranks share one where NCCL would refuse it or hang."""

from __future__ import annotations

import os

import torch
from torch import distributed as dist

from colossus.context.visible_devices import VARIABLE, counted, explain_visible, may_be_of_one_rank


def pick_device(wanted: str, backend: str = "auto") -> torch.device:
    """``auto`` is CUDA when there is any: the device with the number of the local rank; under gloo ranks take turns.

    Where a rank that torchrun or srun has started sees one device only, perhaps each of its neighbours sees another
    (SLURM's ``--gpus-per-task``, a script that sets ``CUDA_VISIBLE_DEVICES`` by rank); whether they do is seen when
    the ranks join (`require_own_device`).

    Args:
        backend: ``comm.backend``.

    Raises:
        ValueError: when CUDA is asked for and absent, or there are fewer devices than local ranks.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        note = explain_visible(os.environ, 0)
        raise ValueError(
            f"device = 'cuda', but torch finds no CUDA device here{note and f' ({note})'}; use device='auto' or 'cpu'"
        )
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if backend == "gloo" or (count == 1 and may_be_of_one_rank(os.environ)):
        local %= count
    if local >= count:
        note = explain_visible(os.environ, count)
        raise ValueError(
            f"local rank {local} has no CUDA device: {counted(count)} here{note and f' ({note})'}; use --nproc {count} "
            f"or fewer. NCCL refuses two ranks on one device; comm.backend='gloo' lets ranks share devices, slowly: "
            f"what they send each other goes through the memory of the host"
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device


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
