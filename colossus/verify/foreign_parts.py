"""The place of a parameter of somebody's model in the whole, by what its framework says of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from colossus.layout.layout import Box
from colossus.verify.record_folder import Part

#: the name in one process from the name in this model, as a function or as prefix -> prefix
Names = Callable[[str], str] | Mapping[str, str] | None
#: (name, parameter) -> (dim, index, count) of this rank's part, or (dim, index, count, blocks) of a fused parameter,
#: each of whose blocks is split by itself; None: the parameter is whole
SplitOf = Callable[[str, nn.Parameter], tuple[int, ...] | None] | None

#: modules that wrappers put between a model and its parent: DDP, torch.compile, checkpointing, FSDP 1
_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def logical_name(name: str, names: Names) -> str:
    """Return the name in one process of a parameter or module of this rank's model."""
    name = ".".join(word for word in name.split(".") if word not in _WRAPPERS)
    if callable(names):
        return names(name)
    for prefix, other in (names or {}).items():
        if name == prefix or name.startswith(prefix + "."):
            return other + name[len(prefix) :]
    return name


def parts_of(kind: str, name: str, parameter: nn.Parameter, split: SplitOf) -> list[Part]:
    """Return this rank's parts of a parameter, or of its gradient: none where it has no gradient, or no element.

    Args:
        kind: ``weight`` or ``gradient``.
        name: the logical name.

    Raises:
        ValueError: the parameter is a flat one of FSDP 1, whose elements have no places in their parameters.
    """
    if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):
        return _whole(kind, name, _tensor_of_deepspeed(kind, parameter))
    tensor = parameter.grad if kind == "gradient" else parameter.detach()
    if tensor is None:
        return []
    if hasattr(tensor, "placements"):
        return _parts_of_dtensor(kind, name, tensor)
    if type(parameter).__name__ == "FlatParameter":
        raise ValueError(
            f"{name} is a flat parameter of FSDP 1: record the loop with FSDP 2 (torch.distributed.fsdp.fully_shard), "
            f"or the same model under DDP"
        )
    where = split(name, parameter) if split is not None else _split_of_megatron(name, parameter)
    if where is None:
        return _whole(kind, name, tensor)
    dim, index, count, blocks = (*where, 1)[:4]
    tensor = _dense(tensor)
    size = tensor.shape[dim] // blocks
    shape = (*tensor.shape[:dim], tensor.shape[dim] * count, *tensor.shape[dim + 1 :])
    parts = []
    for block, value in enumerate(tensor.split(size, dim)):
        start = (block * count + index) * size
        box = tuple((start, start + size) if d == dim else (0, length) for d, length in enumerate(shape))
        parts.append(Part(kind, name, box, shape, value.contiguous()))
    return parts


def _whole(kind: str, name: str, tensor: Tensor | None) -> list[Part]:
    if tensor is None:
        return []
    value = _dense(tensor)
    return [Part(kind, name, tuple((0, size) for size in value.shape), tuple(value.shape), value)]


def _parts_of_dtensor(kind: str, name: str, tensor: Any) -> list[Part]:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(not placement.is_replicate() and type(placement) is not Shard for placement in tensor.placements):
        # partial sums, and dims that two axes split in strides, have no box
        return _whole(kind, name, tensor.full_tensor())
    shape = tuple(tensor.shape)
    local, starts = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
    box: Box = tuple((start, start + size) for start, size in zip(starts, local, strict=True))
    value = tensor.to_local()
    return [Part(kind, name, box, shape, _dense(value))] if value.numel() else []


def _tensor_of_deepspeed(kind: str, parameter: nn.Parameter) -> Tensor | None:
    """Return the whole tensor: every rank takes part in its gather."""
    functions = sys.modules["deepspeed.utils"]
    value: Tensor | None = (functions.safe_get_full_grad if kind == "gradient" else functions.safe_get_full_fp32_param)(
        parameter
    )
    return value


def _split_of_megatron(name: str, parameter: nn.Parameter) -> tuple[int, ...] | None:
    """Return the split that Megatron's attributes tell; a stride is the number of fused blocks.

    Raises:
        ValueError: the attributes are there without Megatron's groups.
    """
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    state: Any = sys.modules.get("megatron.core.parallel_state")
    if state is None:
        raise ValueError(
            f"{name} is split (tensor_model_parallel), but megatron.core, which knows this rank's part, is not "
            f"imported: pass split=(name, parameter) -> (dim, index, count)"
        )
    rank, count = state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()
    return int(parameter.partition_dim), rank, count, int(getattr(parameter, "partition_stride", 1))  # type: ignore


def _dense(tensor: Tensor) -> Tensor:
    value = tensor.detach()
    return (value.to_dense() if value.layout is not torch.strided else value).to("cpu", copy=True).contiguous()
