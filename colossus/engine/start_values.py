"""That the values a run starts from are the same on all ranks that hold them.

What is drawn while a model is built is the same by its keys. What was there before (a module made outside of the
factory), and what a constructor computes from things that differ between processes, is not: each rank would train a
model of its own, while loss and norm, which are sums over ranks, agree.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from colossus.arithmetic import named_ranks
from colossus.comm.objects import all_gather_object
from colossus.context.parallel_context import ParallelContext
from colossus.engine.start_check import differs
from colossus.layout.parameter import spec_of

#: tensors that a message names
_MOST = 5
_SMALL_BYTES = 1 << 16
_COLUMNS = 1021


def hashes_of_existing(model: nn.Module) -> dict[str, str]:
    """Name -> hash of the parameters and buffers that have values already while their model is still on meta."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: hash_of(tensor) for name, tensor in tensors if not tensor.is_meta}


def require_same_values(model: nn.Module, existing: dict[str, str], context: ParallelContext) -> None:
    """That what existed before the build is equal on all ranks, and plain parameters on all that hold the same stage.

    One small gather; names are sent only where values differ.

    Args:
        existing: of the whole model, from `hashes_of_existing`.

    Raises:
        ValueError: on all ranks, with the names of the tensors that differ.
    """
    if context.world_size == 1:
        return
    plain = {
        name: hash_of(param)
        for name, param in model.named_parameters()
        if (spec := spec_of(param)).is_plain and not spec.layout.stored  # else ranks hold different rows
    }
    world, stage = context.group(context.grid.names), context.index("pipeline")
    summaries = all_gather_object((stage, _summary(existing), _summary(plain)), world)
    if len({of_existing for _, of_existing, _ in summaries}) > 1:
        names, ranks = _differing(all_gather_object(existing, world))
        raise ValueError(
            f"{names} existed before the model was built, with other values on {ranks} than on rank 0. Tensors made "
            f"outside of the factory are taken as they are, and ranks would train different models: build the whole "
            f"model inside (model=Net, or model=lambda: Net(...)), where values depend on train.seed alone; or make "
            f"them equal on every rank (load one checkpoint, or seed what draws them)"
        )
    of_stages = [{summary for at, _, summary in summaries if at == s} for s in range(context.size("pipeline"))]
    wrong = next((s for s, found in enumerate(of_stages) if len(found) > 1), None)
    if wrong is not None:
        gathered = all_gather_object((stage, plain), world)
        members = [rank for rank, (at, _) in enumerate(gathered) if at == wrong]
        names, ranks = _differing([gathered[rank][1] for rank in members], members)
        raise ValueError(
            f"{names} would start with other values on {ranks} than on rank {members[0]}, and ranks would train "
            f"different models: the constructor uses something that differs between processes (a tensor made outside, "
            f"a generator without a seed, the rank, the time). Let values depend on torch's generators and the config "
            f"alone"
        )


def _summary(hashes: dict[str, str]) -> str:
    return hashlib.blake2b(repr(sorted(hashes.items())).encode(), digest_size=16).hexdigest()


def _differing(by_rank: list[dict[str, str]], ranks: list[int] | None = None) -> tuple[str, str]:
    """The names of the tensors that differ, and the ranks that do not have the first one's values, in words."""
    numbers = list(range(len(by_rank))) if ranks is None else ranks
    names = [name for name in dict.fromkeys(name for one in by_rank for name in one) if differs(name, by_rank)]
    others = [rank for rank, one in zip(numbers, by_rank, strict=True) if one != by_rank[0]]
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more, named_ranks(others)


def hash_of(tensor: Tensor) -> str:
    """Of all values, shape and type; of tensors that are no plain arrays of the latter two.

    Of large ones sums of columns are hashed, at the speed of memory.
    """
    found = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    if tensor.layout is not torch.strided or tensor.is_quantized or type(tensor.data) is not Tensor:
        return found.hexdigest()
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if flat.numel() > _SMALL_BYTES:
        whole = flat.numel() // (8 * _COLUMNS) * (8 * _COLUMNS)
        # a view as integers of eight bytes wants an address that they divide
        table = flat[:whole] if flat.data_ptr() % 8 == 0 else flat[:whole].clone()
        sums = table.view(torch.int64).view(-1, _COLUMNS).sum(0)
        flat = torch.cat((sums.view(torch.uint8), flat[whole:]))
    found.update(flat.cpu().numpy().tobytes())
    return found.hexdigest()
