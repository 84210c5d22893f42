"""How a tensor is split: over which axes, in which of its dims, and where these are after a function."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from colossus.context.parallel_context import ParallelContext
from colossus.layout.activation import Activation
from colossus.layout.layout import Layout
from colossus.layout.redistribute import redistribute
from colossus.tensor_parallel.mode import Regions


class Place(NamedTuple):
    """Where a split dim is. Flattened with others, it is the middle of ``before`` x the dim x ``after``.

    Attributes:
        dim: from the left; negative from the right, in the answer of a rule that need not know the number of dims.
    """

    dim: int
    before: int = 1
    after: int = 1

    def count(self, shape: Sequence[int]) -> int:
        """The elements along the split dim that this rank has."""
        return shape[self.dim] // (self.before * self.after)

    def at(self, dim: int) -> Place:
        return Place(dim, self.before, self.after)


class MixesPartsError(Exception):
    """A function does not work on each part of a split dim by itself, or is not known to: the message says why."""


def as_dims(dims: Any) -> tuple[Any, ...] | None:
    """Dims that were given as one, as several, or not at all: then all are meant."""
    if dims is None or isinstance(dims, bool) or (isinstance(dims, (tuple, list)) and not dims):
        return None
    return tuple(dims) if isinstance(dims, (tuple, list)) else (dims,)


def avoid(place: Place, ndim: int, dims: Any, does: str) -> Place:
    """``place``, which must not be among ``dims`` (None: all)."""
    found = as_dims(dims)
    if found is None:
        raise MixesPartsError(f"{does} all dims at once")
    for dim in found:
        if not isinstance(dim, int):
            raise MixesPartsError(f"{does} {dim!r}, which is not known to leave the split dim alone")
        if dim % ndim == place.dim:
            raise MixesPartsError(f"{does} dim {dim}, which is split")
    return place


def without(place: Place, ndim: int, dims: Any) -> Place:
    """The place once other dims are gone."""
    gone = {dim % ndim for dim in as_dims(dims) or ()}
    return place.at(place.dim - sum(dim < place.dim for dim in gone))


def regrouped(place: Place, source: Sequence[int], target: Sequence[int], inferred: int | None, parts: bool) -> Place:
    """Where a split dim is after a reshape, which keeps the order of the elements.

    Args:
        inferred: the dim whose size was left open (-1), if one was.
        parts: whether ranks hold contiguous parts of the dim, as of features, so that it may be cut into groups, of
            which the outermost is split then (heads of features). Groups of all ranks are not known here, so their
            number must be left open.
    """
    count, after = place.count(source), place.after
    if math.prod(source) != math.prod(target):
        raise MixesPartsError(f"takes shape {tuple(source)}, the rank's part, as {tuple(target)}")
    inner = after * math.prod(source[place.dim + 1 :])
    candidates = []
    stride = 1
    for dim in range(len(target) - 1, -1, -1):
        extent = target[dim] * stride
        if stride and inner and inner % stride == 0 and extent % (inner * count) == 0:
            within = inner // stride
            candidates.append(Place(dim, target[dim] // (count * within), within))
        stride = extent
    is_cut = parts and inferred is not None and place.before == 1
    if is_cut and math.prod(target[:inferred]) == math.prod(source[: place.dim]):
        # features -> [groups, ..]: the groups are split, whose number was left open. A rank's one group may be the
        # whole of its part: then a new dim says that groups are meant
        only_group = len(target) > len(source) > 1 and [each.dim - 1 for each in candidates] == [inferred]
        if only_group or not candidates:
            return Place(inferred)  # type: ignore[arg-type]
    if len(candidates) > 1:  # a rank has one element, which fits anywhere
        ones = [each for each in candidates if target[each.dim] == 1]
        candidates = ones if len(ones) == 1 else [each for each in candidates if each.dim == inferred]
        is_open = len(candidates) != 1
    else:  # a new dim of one beside it, whose size was left open: is it that which grows with the whole?
        beside = [each for each in candidates if inferred is not None and abs(each.dim - inferred) == 1]
        is_open = bool(beside) and target[inferred] == 1 and len(target) > len(source)  # type: ignore[index]
    if is_open or len(candidates) != 1:
        what = "leaves open which dim is split" if is_open else "takes the split dim apart"
        raise MixesPartsError(
            f"{what}: from local shape {tuple(source)}, split in dim {place.dim}, to {tuple(target)}. The split dim "
            f"must stay together in one dim, whose size may be left open (-1)"
        )
    (found,) = candidates
    return Place(found.dim) if parts and found.before == 1 else found


#: what is split, by role: ``sequence`` is the tokens over sequence ranks, ``tokens`` those over tensor ranks
ROLES = ("batch", "sequence", "tokens", "features")


class HasRegions(Protocol):
    """What knows a model's context and regions: `colossus.layers.model_parallel.ModelParallel`."""

    @property
    def context(self) -> ParallelContext: ...
    @property
    def regions(self) -> Regions: ...
    @property
    def whole_placement(self) -> Placement: ...


@dataclass(frozen=True, slots=True)
class Placement:
    """``dim -> axes`` of a tensor. A dim that is split as it is in plain tensors (the batch over data) has no place.

    Attributes:
        activation: the axes, by role.
        return_layout: the layout in which a row linear returns its output.
        places: role -> where that is, of what plain tensors have whole.
        num_features: features of all shards, when the last shard is padded (a vocabulary that does not divide).
        standard_ndim: the number of dims for which `standard` made it; 0 of any other.
        is_of_loss: whether a loss function has it: what it sums over the tokens of a rank is added up over ranks.
    """

    parallel: HasRegions
    activation: Activation
    return_layout: Activation
    places: tuple[tuple[str, Place], ...] = ()
    num_features: int | None = None
    standard_ndim: int = field(default=0, compare=False)
    is_of_loss: bool = False

    @classmethod
    def standard(
        cls,
        parallel: HasRegions,
        activation: Activation,
        return_layout: Activation,
        ndim: int,
        sequence: Place | None = None,
        num_features: int | None = None,
    ) -> Placement:
        """Batch in dim 0, tokens in dim -2, features in the last, as `Activation.at` has them.

        Args:
            sequence: where the tensor has a sequence rank's part of the tokens; None where it has none.
        """
        whole = parallel.regions.whole
        places = []
        if activation.batch != whole.batch and ndim > 1:
            places.append(("batch", Place(0)))
        if sequence is not None:
            places.append(("sequence", sequence))
        if activation.tokens != whole.tokens and ndim > 1:
            places.append(("tokens", Place(ndim - 2)))
        if activation.features:
            places.append(("features", Place(ndim - 1)))
        return cls(parallel, activation, return_layout, tuple(places), num_features, ndim)

    def moved(self, activation: Activation, ndim: int, num_features: int | None = None) -> Placement:
        """Of what a layer makes of this: laid out as ``activation``, of the same tokens, to the same layout back."""
        sequence = self.place("sequence")
        made = Placement.standard(self.parallel, activation, self.return_layout, ndim, sequence, num_features)
        return replace(made, is_of_loss=True) if self.is_of_loss else made

    def place(self, role: str) -> Place | None:
        for name, place in self.places:
            if name == role:
                return place
        return None

    def is_standard(self, ndim: int) -> bool:
        """Whether layers may take the tensor for one laid out as ``activation.at(ndim)``."""
        return self.standard_ndim == ndim or self.places == self.moved(self.activation, ndim).places

    @property
    def is_whole(self) -> bool:
        """Whether it is in the whole region: split as plain tensors are, but for the tokens of a sequence."""
        return all(role == "sequence" for role, _ in self.places)

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The axes over which this is split and plain tensors are not, but for those of the sequence."""
        whole = self.parallel.regions.whole.shard_axes
        return tuple(axis for axis in self.activation.shard_axes if axis not in whole)

    def __str__(self) -> str:
        axes = {role: getattr(self.activation, role, ("sequence",)) for role in ROLES}
        return (
            "; ".join(
                f"dim {place.dim}{' (flattened with others)' * (place[1:] != (1, 1))} over {','.join(axes[role])}"
                for role, place in self.places
            )
            or "whole"
        )


def local_mask(mask: Tensor, batch: int, activation: Activation, parallel: HasRegions) -> Tensor:
    """The mask [batch, heads, tokens, tokens] of the samples and heads that this rank computes, as ``activation``.

    Where it is broadcast over samples or heads, its gradient, if any, is summed over the ranks that split them.

    Args:
        mask: its batch in the whole layout, of ``batch`` samples, with all heads and tokens.
    """
    is_split = {0: mask.dim() > 3 and mask.shape[0] == batch, -3: mask.dim() > 2 and mask.shape[-3] > 1}

    def layout(of: Activation) -> Layout:
        dims: list[tuple[str, ...]] = [()] * mask.dim()
        broadcast: tuple[str, ...] = ()
        for dim, axes in ((0, of.batch), (-3, of.features)):
            if is_split[dim]:
                dims[dim] = axes
            else:
                broadcast += axes
        return Layout(tuple(dims), (), broadcast)

    return redistribute(mask, layout(parallel.regions.whole), layout(activation), parallel.context)
