"""Walks over nests: mappings, lists and tuples of anything, as batches and the outputs of models are.

torch's pytree serves where the structure itself is sent or where torch calls us with it. It takes mappings and lists of
a user's own class (the BatchEncoding of transformers, say) as leaves, so batches are walked here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def map_leaves(fn: Callable[[Any], Any], nest: Any, is_leaf: Callable[[Any], bool] = lambda _: False) -> Any:
    """Return the same nest with ``fn`` of each leaf. Mappings become dicts, named tuples stay named tuples.

    Args:
        is_leaf: returns whether to pass a container to ``fn`` as a leaf.
    """
    if not isinstance(nest, Mapping | list | tuple) or is_leaf(nest):
        return fn(nest)
    if isinstance(nest, Mapping):
        return {key: map_leaves(fn, value, is_leaf) for key, value in nest.items()}
    values = [map_leaves(fn, value, is_leaf) for value in nest]
    if isinstance(nest, list):
        return values
    return type(nest)(*values) if hasattr(nest, "_fields") else tuple(values)


def leaves(nest: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf with the path that leads to it, in Python's notation: ``path['inputs'][0]``."""
    if isinstance(nest, Mapping):
        for key, value in nest.items():
            yield from leaves(value, f"{path}[{key!r}]")
    elif isinstance(nest, list | tuple):
        for number, value in enumerate(nest):
            yield from leaves(value, f"{path}[{number}]")
    else:
        yield path, nest


def tensors(nest: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Return an iterator over every tensor of a nest with the path that leads to it."""
    return ((where, leaf) for where, leaf in leaves(nest, path) if isinstance(leaf, Tensor))


def tensors_within(value: Any) -> Iterator[Tensor]:
    """Yield every tensor of a model's output, also those in fields of dataclasses."""
    for _, leaf in leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            for field in fields(leaf):
                yield from tensors_within(getattr(leaf, field.name))
