"""The values between stages: any nest of tensors, flattened into plain local tensors and a `ValueSpec`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten_with_path, tree_unflatten
from torch.utils._pytree import keystr as path_string

from colossus.layers.model_parallel import ModelParallel
from colossus.sharded_tensor.placement import Placement
from colossus.sharded_tensor.tensor import placement_of, plain, wrap

_unsafe_view = torch.ops.aten._unsafe_view.default
_CONSTANTS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a value.

    Attributes:
        shape: of this rank's shard.
        needs_gradient: whether its gradient is sent back to the stage that made it.
        placement: of a `ShardedTensor`, without its ``parallel``; None for a plain tensor.
    """

    shape: torch.Size
    dtype: torch.dtype
    needs_gradient: bool
    placement: Placement | None


@dataclass(frozen=True)
class RepeatedTensor:
    """The tensor that the value holds already at this index of its tensors: sent once, it stays one tensor."""

    index: int


@dataclass(frozen=True)
class ValueSpec:
    """Everything about a value but the contents of its tensors.

    Attributes:
        tree: the structure of the nest.
        leaves: `TensorSpec` or `RepeatedTensor` in place of each tensor; other leaves as they are.
    """

    tree: TreeSpec
    leaves: tuple[Any, ...]

    @property
    def tensors(self) -> list[TensorSpec]:
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorSpec)]

    @property
    def differentiable(self) -> list[TensorSpec]:
        """Those whose gradient is sent back."""
        return [leaf for leaf in self.tensors if leaf.needs_gradient]

    def __str__(self) -> str:
        return f"{tree_unflatten([_describe_leaf(leaf) for leaf in self.leaves], self.tree)}"


def flatten_value(value: Any, parallel: ModelParallel, where: str) -> tuple[ValueSpec, list[Tensor]]:
    """The spec of a value, and its tensors as plain local ones, still in the autograd graph.

    Args:
        where: what made it, for errors.

    Raises:
        ValueError: for a leaf that cannot be sent.
    """
    found, tree = tree_flatten_with_path(value)
    leaves: list[Any] = []
    tensors: list[Tensor] = []
    index_of: dict[int, int] = {}
    for path, item in found:
        if isinstance(item, Tensor) and id(item) in index_of:
            leaves.append(RepeatedTensor(index_of[id(item)]))
        elif isinstance(item, Tensor):
            if item.layout is not torch.strided:
                raise ValueError(
                    f"{where} returned a tensor of layout {item.layout}; what goes on is dense: .to_dense()"
                )
            index_of[id(item)] = len(tensors)
            placement, local = placement_of(item), plain(item)
            if placement is not None:
                placement = replace(placement, parallel=None)  # type: ignore[arg-type]  # each rank has its own
            needs = item.requires_grad and torch.is_grad_enabled()
            leaves.append(TensorSpec(local.shape, local.dtype, needs, placement))
            tensors.append(local)
        elif isinstance(item, _CONSTANTS):
            leaves.append(item)
        else:
            raise ValueError(
                f"{where} returned {type(item).__name__} at {path_string(path) or 'its top'}; what goes on to the next "
                f"stage is a tensor, or a nest of tuples, lists and dicts of tensors, numbers and strings"
            )
    return ValueSpec(tree, tuple(leaves)), tensors


def unflatten_value(spec: ValueSpec, tensors: Iterable[Tensor], parallel: ModelParallel) -> tuple[Any, list[Tensor]]:
    """The value with these tensors, detached from what made them; and its leaves of autograd that get a gradient."""
    rest = iter(tensors)
    items: list[Any] = []
    made: list[Tensor] = []
    roots: list[Tensor] = []
    for leaf in spec.leaves:
        if not isinstance(leaf, TensorSpec):
            items.append(made[leaf.index] if isinstance(leaf, RepeatedTensor) else leaf)
            continue
        local = next(rest).detach()
        if leaf.needs_gradient:
            roots.append(local.requires_grad_())
            local = _unsafe_view(local, local.shape)  # no leaf: a stage may begin with an operation in place
        if leaf.placement is not None:
            local = wrap(local, replace(leaf.placement, parallel=parallel))
        made.append(local)
        items.append(local)
    return tree_unflatten(items, spec.tree), roots


def batch_signature(batch: Any) -> tuple[Any, ...]:
    """Structure, shapes and dtypes of a batch: equal for two batches whose values between stages have equal specs."""
    found, tree = tree_flatten_with_path(batch)
    tensors = [(tuple(item.shape), item.dtype) for _, item in found if isinstance(item, Tensor)]
    return str(tree), tuple(tensors), torch.is_grad_enabled()


def gradients(roots: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of the roots of `unflatten_value`; zeros for those that were not used."""
    return [root.grad if root.grad is not None else torch.zeros_like(root) for root in roots]


def _describe_leaf(leaf: Any) -> Any:
    if isinstance(leaf, RepeatedTensor):
        return f"tensor {leaf.index} again"
    if not isinstance(leaf, TensorSpec):
        return leaf
    return (
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}{'' if leaf.needs_gradient else ' (no gradient)'}"
    )
