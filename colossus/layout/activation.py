"""Layouts of activations by the role of a dim, for any number of dims.

The batch is dim 0, the features the last dim, the tokens dim -2. A tensor with two dims has its samples in dim 0, which
is batch and tokens at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import lru_cache

from colossus.layout.layout import Layout


@dataclass(frozen=True)
class Activation:
    """The layout of an activation by roles; `at` returns the `Layout` for a number of dims.

    Args:
        batch: axes that `Shard` the samples, outermost first.
        tokens: axes that `Shard` the tokens, outermost first.
        features: axes that `Shard` the features, outermost first.
        partial: see `Layout`.
        grad_partial: see `Layout`.
    """

    batch: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    grad_partial: tuple[str, ...] = ()

    def __eq__(self, other: object) -> bool:
        if self is other:  # the usual case: layers compare the layouts of one context at each call
            return True
        return type(other) is Activation and vars(self) == vars(other)

    def at(self, ndim: int) -> Layout:
        """Return the layout of a tensor with ``ndim`` dims (at least one)."""
        return _layout(self, ndim)

    def drop_trivial_axes(self, sizes: Mapping[str, int]) -> Activation:
        """Return the layout without axes of one rank."""
        roles = (tuple(a for a in axes if sizes[a] > 1) for axes in astuple(self))
        return Activation(*roles)

    def rows(self) -> Activation:
        """Return only the sharding of batch and tokens, for a tensor without features (labels, a mask)."""
        return Activation(batch=self.batch, tokens=self.tokens)

    @property
    def shard_axes(self) -> tuple[str, ...]:
        return self.batch + self.tokens + self.features

    def __str__(self) -> str:
        phrases = [
            f"{role} over {','.join(axes)}"
            for role, axes in (("batch", self.batch), ("tokens", self.tokens), ("features", self.features))
            if axes
        ]
        if self.partial:
            phrases.append(f"Partial({','.join(self.partial)})")
        if self.grad_partial:
            phrases.append(f"Replicate({','.join(self.grad_partial)})")
        return "; ".join(phrases) or "whole"


@lru_cache(maxsize=1024)
def _layout(activation: Activation, ndim: int) -> Layout:
    dims: list[tuple[str, ...]] = [()] * ndim
    dims[-1] = activation.features
    if ndim == 2:
        dims[0] = activation.batch + activation.tokens
    elif ndim > 2:
        dims[0] = activation.batch
        dims[-2] = activation.tokens
    return Layout(tuple(dims), activation.partial, activation.grad_partial)


def gradient_axes(parameter: Layout, *uses: Layout | Activation) -> tuple[str, ...]:
    """Return the axes over which a parameter's local gradient is a partial sum, for the activations that it meets.

    The gradient sums over everything that the activations are sharded or partial over. Along an axis that shards the
    parameter itself, the rank's gradient is complete: other ranks have other rows or columns.
    """
    axes: list[str] = []
    for use in uses:
        for axis in (*use.shard_axes, *use.grad_partial):
            if axis not in parameter.shard_axes and axis not in axes:
                axes.append(axis)
    return tuple(axes)
