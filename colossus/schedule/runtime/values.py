"""What goes from stage to stage: any nest of tensors, taken apart into plain local tensors and a description."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten_with_path, tree_unflatten
from torch.utils._pytree import keystr as path_string

from colossus.layers.model_parallel import ModelParallel
from colossus.layers.sharded import ShardedActivation, unwrap, wrap
from colossus.layout.activation import Activation

_unsafe_view = torch.ops.aten._unsafe_view.default
_CONSTANTS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class Leaf:
    """One tensor of a nest.

    Attributes:
        shape: of this rank's part.
        needs_gradient: whether the stage that made it waits for its gradient.
        split: how it is split and its output_layout and features, for a `ShardedActivation`.
    """

    shape: torch.Size
    dtype: torch.dtype
    needs_gradient: bool
    split: tuple[Activation, Activation, int | None] | None


@dataclass(frozen=True)
class Again:
    """A tensor that is in the nest already, as the one of this number: it travels once, and stays one tensor."""

    number: int


@dataclass(frozen=True)
class Description:
    """A nest without the numbers in its tensors.

    Attributes:
        tree: its structure.
        leaves: a `Leaf` for each tensor, or `Again`; other leaves as they are.
    """

    tree: TreeSpec
    leaves: tuple[Any, ...]

    @property
    def tensors(self) -> list[Leaf]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Leaf)]

    @property
    def differentiable(self) -> list[Leaf]:
        """The tensors whose gradient is sent back."""
        return [leaf for leaf in self.tensors if leaf.needs_gradient]

    def __str__(self) -> str:
        return f"{tree_unflatten([_brief(leaf) for leaf in self.leaves], self.tree)}"


def flatten_value(value: Any, parallel: ModelParallel, where: str) -> tuple[Description, list[Tensor]]:
    """The description of a nest, and its tensors as plain local ones, still in the autograd graph.

    Args:
        where: what made it, for errors.

    Raises:
        ValueError: for something in the nest that cannot travel.
    """
    found, tree = tree_flatten_with_path(value)
    leaves: list[Any] = []
    tensors: list[Tensor] = []
    places: dict[int, int] = {}
    for path, item in found:
        if isinstance(item, Tensor) and id(item) in places:
            leaves.append(Again(places[id(item)]))
        elif isinstance(item, Tensor):
            if item.layout is not torch.strided:
                raise ValueError(f"{where} returned a tensor of layout {item.layout}; what goes on is dense")
            places[id(item)] = len(tensors)
            split = (
                (item.activation, item.output_layout, item.num_features)
                if isinstance(item, ShardedActivation)
                else None
            )
            local = unwrap(item, parallel)[0]
            needs = item.requires_grad and torch.is_grad_enabled()
            leaves.append(Leaf(local.shape, local.dtype, needs, split))
            tensors.append(local)
        elif isinstance(item, _CONSTANTS):
            leaves.append(item)
        else:
            raise ValueError(
                f"{where} returned {type(item).__name__} at {path_string(path) or 'its top'}; what goes on to the next "
                f"stage is a tensor, or a nest of tuples, lists and dicts of tensors, numbers and strings"
            )
    return Description(tree, tuple(leaves)), tensors


def unflatten_value(
    description: Description, tensors: Iterable[Tensor], parallel: ModelParallel
) -> tuple[Any, list[Tensor]]:
    """The nest with these tensors in it, detached from whatever made them; and those that await a gradient."""
    rest = iter(tensors)
    items: list[Any] = []
    made: list[Tensor] = []
    roots: list[Tensor] = []
    for leaf in description.leaves:
        if not isinstance(leaf, Leaf):
            items.append(made[leaf.number] if isinstance(leaf, Again) else leaf)
            continue
        local = next(rest).detach()
        if leaf.needs_gradient:
            roots.append(local.requires_grad_())
            local = _unsafe_view(local, local.shape)  # no leaf: a stage may begin with an operation in place
        if leaf.split is not None:
            activation, output_layout, num_features = leaf.split
            local = wrap(local, activation, output_layout, parallel, num_features)
        made.append(local)
        items.append(local)
    return tree_unflatten(items, description.tree), roots


def signature(batch: Any) -> tuple[Any, ...]:
    """What the shapes of everything that is made from a batch follow from: the same on all ranks of a model."""
    found, tree = tree_flatten_with_path(batch)
    tensors = [(tuple(item.shape), item.dtype) for _, item in found if isinstance(item, Tensor)]
    return str(tree), tuple(tensors), torch.is_grad_enabled()


def gradients(roots: Sequence[Tensor]) -> list[Tensor]:
    """What has come back to tensors that await a gradient; zeros for those that were not used."""
    return [root.grad if root.grad is not None else torch.zeros_like(root) for root in roots]


def _brief(leaf: Any) -> Any:
    if isinstance(leaf, Again):
        return f"tensor {leaf.number} again"
    if not isinstance(leaf, Leaf):
        return leaf
    return (
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}{'' if leaf.needs_gradient else ' (no gradient)'}"
    )
