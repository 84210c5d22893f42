"""How a tensor is split: over which axes, in which of its dims, and where it goes back to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from colossus.context.parallel_context import ParallelContext
from colossus.layout.activation import Activation
from colossus.sharded_tensor.place import Place
from colossus.tensor_parallel.mode import Regions

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
        return Placement.standard(self.parallel, activation, self.return_layout, ndim, sequence, num_features)

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
