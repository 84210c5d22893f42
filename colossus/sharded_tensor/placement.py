"""The placement of a split tensor: over which axes, and in which of its dims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from colossus.context.parallel_context import ParallelContext
from colossus.layout.activation import Activation
from colossus.layout.layout import Layout
from colossus.layout.redistribute import move
from colossus.sequence_parallel.split import SequenceSplit
from colossus.tensor_parallel.mode import Regions

#: (start, stop, length): tokens of a sequence of this length that a slice has left
Window = tuple[int, int, int]


class Place(NamedTuple):
    """The position of a split dim.

    A dim that is flattened with others is the middle one of ``before`` x the dim x ``after``.

    Attributes:
        dim: the dim from the left; a rule may return a negative one, from the right.
        before, after: this rank's elements of the dims before and after it with which it is flattened.
        window: the tokens of a sequence that are left after a slice; None for all.
    """

    dim: int
    before: int = 1
    after: int = 1
    window: Window | None = None

    def count(self, shape: Sequence[int]) -> int:
        """Return the elements along the split dim that this rank has."""
        return shape[self.dim] // (self.before * self.after)

    def at(self, dim: int) -> Place:
        return self._replace(dim=dim)


class Segment(NamedTuple):
    """A split dim: the roles that split it, where it is, and its elements on this rank and on all ranks together."""

    roles: tuple[str, ...]
    place: Place
    local: int
    whole: int


class MixesPartsError(Exception):
    """The error for a function that does not work on parts of a split dim by themselves, or is not known to.

    The message says why, in words that follow the name of the function.
    """


def as_dims(dims: Any) -> tuple[Any, ...] | None:
    """Return dims as a tuple; None where a function takes all of them."""
    if dims is None or isinstance(dims, bool) or (isinstance(dims, (tuple, list)) and not dims):
        return None
    return tuple(dims) if isinstance(dims, (tuple, list)) else (dims,)


def avoid(place: Place, ndim: int, dims: Any, does: str) -> Place:
    """Return ``place``; raise MixesPartsError where it is among ``dims`` (None: all)."""
    named = as_dims(dims)
    if named is None:
        raise MixesPartsError(f"{does} all dims at once")
    for dim in named:
        if not isinstance(dim, int):
            raise MixesPartsError(f"{does} {dim!r}, which is not known to leave the split dim alone")
        if dim % ndim == place.dim:
            raise MixesPartsError(f"{does} dim {dim}, which is split")
    return place


def without(place: Place, ndim: int, dims: Any) -> Place:
    """Return the place once other dims are gone."""
    removed_dims = {dim % ndim for dim in as_dims(dims) or ()}
    return place.at(place.dim - sum(dim < place.dim for dim in removed_dims))


#: roles of split dims: ``sequence`` is the tokens over sequence ranks, ``tokens`` those over tensor ranks
ROLES = ("batch", "sequence", "tokens", "features")


class HasNumTokens(Protocol):
    """An object with the length of sequences without padding: `colossus.layers.model_parallel.BatchInfo`."""

    @property
    def num_tokens(self) -> int | None: ...


class HasRegions(Protocol):
    """An object with a model's context and regions: `colossus.layers.model_parallel.ModelParallel`."""

    @property
    def context(self) -> ParallelContext: ...
    @property
    def regions(self) -> Regions: ...
    @property
    def whole_placement(self) -> Placement: ...
    @property
    def sequence(self) -> SequenceSplit | None: ...
    @property
    def batch_info(self) -> HasNumTokens: ...


@dataclass(frozen=True, slots=True)
class Placement:
    """The split dims of a tensor and their axes, without dims that plain tensors split alike (the batch over data).

    Attributes:
        activation: the axes, by role.
        return_layout: the layout in which a row linear returns its output.
        places: (role, place) of each dim that is split here and not in plain tensors.
        num_features: features of all shards, when the last shard is padded (a vocabulary that the ranks do not divide).
        standard_ndim: the number of dims for which `standard` made it; 0 if it was made otherwise.
    """

    parallel: HasRegions
    activation: Activation
    return_layout: Activation
    places: tuple[tuple[str, Place], ...] = ()
    num_features: int | None = None
    standard_ndim: int = field(default=0, compare=False)

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
        """Return the placement with batch in dim 0, tokens in dim -2 and features last, as in `Activation.at`.

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
        """Return the placement of a layer's output, laid out as ``activation``, with this return layout."""
        sequence = self.place("sequence")
        return Placement.standard(self.parallel, activation, self.return_layout, ndim, sequence, num_features)

    def place(self, role: str) -> Place | None:
        for name, place in self.places:
            if name == role:
                return place
        return None

    def axes(self, role: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the axes that split a role in plain tensors, and here; not of ``sequence``."""
        return getattr(self.parallel.regions.whole, role), getattr(self.activation, role)

    def ways(self, role: str) -> tuple[int, int]:
        """Return over how many ranks a role is split here, and in plain tensors."""
        if role == "sequence":
            assert self.parallel.sequence is not None
            return self.parallel.sequence.num_shards, 1
        whole, here = (self.parallel.context.size(axes) if axes else 1 for axes in self.axes(role))
        return here, whole

    def segments(self, shape: Sequence[int]) -> list[Segment]:
        """Return the split dims of a tensor of which this rank has ``shape``; roles may share one."""
        segments: list[Segment] = []
        for place in dict.fromkeys(place for _, place in self.places):
            roles = tuple(role for role, other in self.places if other == place)
            whole = count = place.count(shape)
            for role in roles:
                here, of_plain = self.ways(role)
                whole = whole * here // of_plain
            if place.window is not None:
                whole = place.window[1] - place.window[0]
            elif self.num_features is not None and "features" in roles:
                whole = self.num_features
            segments.append(Segment(roles, place, count, whole))
        return segments

    def whole_shape(self, shape: Sequence[int]) -> torch.Size:
        """Return the shape of the whole tensor, of which a rank has ``shape``; the samples are those of a data rank."""
        sizes = list(shape)
        for _, place, count, whole in self.segments(shape):
            sizes[place.dim] = sizes[place.dim] // count * whole if count else place.before * place.after * whole
        return torch.Size(sizes)

    def is_standard(self, ndim: int) -> bool:
        """Return whether layers may take the tensor for one laid out as ``activation.at(ndim)``."""
        return self.standard_ndim == ndim or self.places == self.moved(self.activation, ndim).places

    @property
    def is_whole(self) -> bool:
        """Return whether it is in the whole region: split as plain tensors are, but for the tokens of a sequence."""
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
                f"dim {place.dim}{' (flattened with others)' * (place[1:3] != (1, 1))} over {','.join(axes[role])}"
                for role, place in self.places
            )
            or "whole"
        )


def placement_of(x: Any) -> Placement | None:
    """Return the placement of a split tensor; None for a plain one, and for anything else."""
    placement = None if type(x) is Tensor else getattr(x, "placement", None)
    return placement if isinstance(placement, Placement) else None


def shared_base(placements: Sequence[Placement]) -> Placement:
    """Return the placement whose axes and regions a result has; split operands must agree in them."""
    split = [placement for placement in placements if not placement.is_whole]
    for other in split[1:]:
        if other.activation != split[0].activation:
            raise MixesPartsError(
                f"combines a tensor that is split as ({split[0].activation}) with one that is split as "
                f"({other.activation}): bring both to one layout with colossus.layers.to_whole or to_residual"
            )
    return split[0] if split else placements[0]


def part_of_whole(x: Tensor, dims: Mapping[str, int], placement: Placement, *, on_meta: bool = False) -> Tensor:
    """Return this rank's part of a plain tensor that all ranks which share it have whole.

    Its gradient is gathered over the ranks that split it, and summed over those over whose dims it is broadcast.

    Args:
        dims: role -> the dim that is split; not of a role over which it is broadcast, nor ``sequence``.
        on_meta: whether it belongs to a trial on the meta device, where ranks do not communicate.
    """
    context = placement.parallel.context
    if on_meta:
        for role, dim in dims.items():
            here, whole = placement.ways(role)
            x = x.narrow(dim, 0, x.shape[dim] * whole // here)
        return x

    def layout(here: bool) -> Layout:
        split: list[tuple[str, ...]] = [()] * x.dim()
        broadcast: tuple[str, ...] = ()
        for role in ("batch", "tokens", "features"):
            axes = placement.axes(role)[here]
            if role in dims:
                split[dims[role]] += axes
            else:
                broadcast += axes
        return Layout(tuple(split), (), broadcast)

    return move(x, layout(False), layout(True), context)


def local_mask(mask: Tensor, batch: int, activation: Activation, parallel: HasRegions) -> Tensor:
    """Return the mask [batch, heads, tokens, tokens] of the samples and heads that this rank computes.

    Args:
        mask: its batch in the whole layout, of ``batch`` samples, with all heads and tokens.
        activation: the layout of the attention's output.
    """
    rows = Activation(activation.batch, parallel.regions.whole.tokens, activation.features)
    dims = {"batch": 0} if mask.dim() > 3 and mask.shape[0] == batch else {}
    if mask.dim() > 2 and mask.shape[-3] > 1:
        dims["features"] = mask.dim() - 3
    return part_of_whole(mask, dims, Placement(parallel, rows, rows))
