"""The arithmetic of a plan: ranks and their coordinates on named axes, options of layers. No torch, no process.

Ranks are numbered row-major over the axes, outermost first, so the last axis varies fastest and its ranks are
neighbours. By default the order is pipeline, data, sequence, tensor: the tensor axes move most bytes per second and
therefore go to ranks next to each other (on one node); pipeline moves the fewest and goes outermost.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from colossus.arithmetic import expert_factor
from colossus.registry import SEQUENCE_MODES, TENSOR_MODES

PUBLIC_NAMES = ("pipeline", "data", "sequence", "tensor", "expert")

Axes = str | Iterable[str]


@dataclass(frozen=True)
class RankGrid:
    """A grid of ranks with named axes.

    An *axis* below is an atomic one (``row``). Methods take atomic axes, public names (``tensor``), or tuples of them.

    Args:
        sizes: atomic axis -> number of ranks along it, outermost first.
        public: public name -> the atomic axes it stands for, outermost first (``tensor`` -> ``row``, ``col``).
    """

    sizes: Mapping[str, int]
    public: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    @cached_property
    def expert_axes(self) -> tuple[str, ...]:
        """The axes of more than one rank over which the experts are spread."""
        return tuple(axis for axis in self.public.get("expert", ()) if self.sizes[axis] > 1)

    @cached_property
    def world_size(self) -> int:
        return math.prod(self.sizes.values())

    def axes(self, axes: Axes) -> tuple[str, ...]:
        """Return the atomic axes of these names, in the same order.

        Raises:
            ValueError: for an unknown name, and for an axis named twice.
        """
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        out: list[str] = []
        for name in names:
            if name in self.public:
                out.extend(self.public[name])
            elif name in self.sizes:
                out.append(name)
            else:
                choices = sorted({*self.sizes, *self.public})
                raise ValueError(f"no axis named {name!r} in this plan; axes are {', '.join(choices)}")
        if len(set(out)) != len(out):
            raise ValueError(f"axes {names} name the same mesh axis twice: {tuple(out)}")
        return tuple(out)

    def size(self, axes: Axes) -> int:
        """Return the number of ranks of a group over these axes."""
        return math.prod([self.sizes[axis] for axis in self.axes(axes)])  # a list: a compiler traces no generator

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of ``rank`` on every atomic axis, outermost first.

        Raises:
            ValueError: the rank is outside the grid.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside 0..{self.world_size - 1}")
        coordinates = {}
        for name in reversed(self.names):
            rank, coordinates[name] = divmod(rank, self.sizes[name])
        return {name: coordinates[name] for name in self.names}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank at these coordinates (all atomic axes)."""
        rank = 0
        for name, size in self.sizes.items():
            rank = rank * size + coordinates[name]
        return rank

    def index(self, rank: int, axes: Axes) -> int:
        """Return the position of ``rank`` within its group over ``axes`` (first axis outermost)."""
        at = self.coordinates(rank)
        index = 0
        for axis in self.axes(axes):
            index = index * self.sizes[axis] + at[axis]
        return index

    def where(self, rank: int) -> str:
        """Return the coordinates of ``rank`` along axes of more than one rank, for messages: ``pipeline 0, data 1``."""
        return ", ".join(f"{axis} {at}" for axis, at in self.coordinates(rank).items() if self.sizes[axis] > 1)

    def group(self, rank: int, axes: Axes) -> list[int]:
        """Return the ranks that share every coordinate of ``rank`` except those on ``axes``, ordered by ``axes``."""
        at = self.coordinates(rank)
        names = self.axes(axes)
        ranges = [range(self.sizes[name]) for name in names]
        return [self.rank({**at, **dict(zip(names, point, strict=True))}) for point in itertools.product(*ranges)]


def build_grid(parallel: Any) -> RankGrid:
    """Return the grid of a resolved ``ParallelConfig`` (``data`` is already a number)."""
    mode = TENSOR_MODES.get(parallel.tensor.mode)
    tensor = mode.axis_sizes(parallel.tensor.size, parallel.tensor.depth, parallel.tensor.shape)
    sequence = SEQUENCE_MODES.get(parallel.sequence.mode or "ring")
    shard = parallel.zero.shard  # ZeRO shards in groups of so many neighbours, and replicates between them
    data = {"data": parallel.data} if shard is None else {"replicate": parallel.data // shard, "shard": shard}
    factor = expert_factor(parallel.data, parallel.sequence.size, parallel.expert.size)
    if factor > 1:  # neighbours along data
        name, size = data.popitem()
        data |= {"outer" if name == "data" else name: size // factor, "inner": factor}
    atomic: dict[str, dict[str, int]] = {
        "pipeline": {"pipeline": parallel.pipeline.size},
        "data": data,
        "sequence": sequence.axis_sizes(parallel.sequence.size, parallel.sequence.ulysses),
        "tensor": tensor,
    }
    sizes: dict[str, int] = {}
    for name in parallel.rank_order:
        sizes.update(atomic[name])
    public = {name: tuple(axes) for name, axes in atomic.items()}
    public["expert"] = ("inner",) if factor > 1 else ()
    if parallel.expert.size > factor:
        public["expert"] += public["sequence"]
    return RankGrid(sizes, public)


_OF_ONE = ("pipeline", "data", "sequence", "tensor")
ONE_RANK = RankGrid(dict.fromkeys(_OF_ONE, 1), {**{name: (name,) for name in _OF_ONE}, "expert": ()})


@dataclass(frozen=True)
class LayerOptions:
    """The options of how layers compute and communicate. They do not change the results.

    Attributes:
        tensor_mode: name of a tensor mode (``1d``, ``2d``, ``2.5d``, ``3d``, or a registered one).
        sequence_mode: name of the mode that splits attention over the sequence axis.
        sequence_chunks: chunks of a sequence on each rank of a ring.
        sequence_sharded: 1D shards activations between blocks by tokens.
        keep_gathered: backward reuses inputs that forward gathered, instead of gathering them again.
        weight_scope: the lifetime of a gathered weight: ``matmul``, ``microbatch`` or ``step``.
        panels: the most panels of rows in which a product moves its operands, see `colossus.tensor_parallel.panels`.
        reproducible: sums have the same bits under every plan, see `colossus.gradients.order_free`.
    """

    tensor_mode: str = "1d"
    sequence_mode: str = "ring"
    sequence_chunks: int = 2
    sequence_sharded: bool = False
    keep_gathered: bool = False
    weight_scope: str = "matmul"
    panels: int = 1
    reproducible: bool = False

    @classmethod
    def from_config(cls, config: Any) -> LayerOptions:
        """Return the options of a resolved config."""
        parallel, tensor = config.parallel, config.parallel.tensor
        return cls(
            tensor_mode=tensor.mode,
            sequence_mode=parallel.sequence.mode or "ring",
            sequence_chunks=parallel.sequence.chunks,
            sequence_sharded=tensor.sequence_sharded,
            keep_gathered=tensor.gathered == "keep",
            weight_scope=tensor.weights,
            panels=tensor.panels,
            reproducible=config.train.reproducible is not None,
        )
