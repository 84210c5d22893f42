"""The order of layouts in a search: the first ones, and the neighbours of a good one. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from colossus.planner.model_layouts import ModelLayout

#: the most ranks of a sequence in the first layouts: the profile of a ring takes as many steps
_FEW = 4


def is_plain(layout: ModelLayout) -> bool:
    """Return whether a search may begin with this layout.

    Such a layout has 1D tensor parallelism with activations split by tokens (which sends as much and saves less), or
    another mode that gathers weights once per step; a ring or Ulysses over few ranks; no or full checkpointing.
    """
    tensor, sequence = layout.tensor, layout.sequence
    if tensor.mode == "1d":
        is_plain_tensor = tensor.size == 1 or tensor.sequence_sharded
    else:
        is_plain_tensor = tensor.weights == "step"
    is_plain_sequence = sequence.mode != "hybrid" and sequence.size <= _FEW
    return is_plain_tensor and is_plain_sequence and layout.activation_checkpoint.type != "selective"


def first_of_each_kind(every: Sequence[ModelLayout], likely: Callable[[ModelLayout], float]) -> list[ModelLayout]:
    """Return the best plain layout of each mode of tensor parallelism, in 1D of each size, and number of expert ranks.

    Layouts without recomputation come before those with. Layouts without a plan that fits are left out. If no layout is
    plain, the first ones are returned.

    Args:
        every: all layouts.
        likely: likely seconds of a layout's best plan, infinite if none fits.
    """
    best: dict[Any, tuple[tuple[bool, float], ModelLayout]] = {}
    for layout in filter(is_plain, every):
        tensor = layout.tensor
        kind = tensor.mode, tensor.size if tensor.mode == "1d" else None, layout.expert
        rank = layout.activation_checkpoint.type != "none", likely(layout)
        if rank[1] < float("inf") and (kind not in best or rank < best[kind][0]):
            best[kind] = rank, layout
    return [layout for _, layout in best.values()] or [*every[:_FEW]]


def kind_of(layout: ModelLayout) -> tuple[str, bool, str | None]:
    """Return a key of layouts whose seconds exceed the closed form by about the same factor."""
    tensor = layout.tensor
    return tensor.mode, tensor.size > 1 and not tensor.sequence_sharded, layout.sequence.mode


def one_of_each_mode(some: Iterable[ModelLayout], likely: Callable[[ModelLayout], float]) -> list[ModelLayout]:
    """Return layouts with the likeliest of each mode of tensor parallelism first, then the second of each, and so on.

    The closed forms are nearer to each other within a mode than between modes: without this the variants of one mode
    would be all that is tried.
    """
    before: Counter[str] = Counter()
    places: list[tuple[int, ModelLayout]] = []
    for layout in sorted(some, key=likely):
        places.append((before[layout.tensor.mode], layout))
        before[layout.tensor.mode] += 1
    return [layout for _, layout in sorted(places, key=lambda place: place[0])]


def recomputed(layout: ModelLayout, every: Sequence[ModelLayout]) -> list[ModelLayout]:
    """Return the same layout with full checkpointing, if there is one."""
    return [
        other
        for other in every
        if (other.tensor, other.sequence, other.expert) == (layout.tensor, layout.sequence, layout.expert)
        and other.activation_checkpoint.type == "full"
    ]


def neighbours(layout: ModelLayout, every: Sequence[ModelLayout]) -> Iterator[ModelLayout]:
    """Yield the layouts that differ in one of tensor mode and size, sequence, expert ranks and checkpointing.

    Sizes differ at most by a factor of two.
    """
    for other in every:
        changed = [
            other.tensor != layout.tensor,
            other.sequence != layout.sequence,
            other.expert != layout.expert,
            other.activation_checkpoint != layout.activation_checkpoint,
        ]
        if sum(changed) == 1 and _is_near(layout, other):
            yield other


def _is_near(one: ModelLayout, other: ModelLayout) -> bool:
    pairs = [(one.tensor.size, other.tensor.size), (one.sequence.size, other.sequence.size), (one.expert, other.expert)]
    return all(a <= 2 * b and b <= 2 * a for a, b in pairs)
