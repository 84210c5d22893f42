"""What ``parallel.pipeline.split`` means: a cost that stages share equally, or their stated bounds. No torch."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from colossus.schedule.partition.balance import StageCost

#: "parameters", "time", "memory", a number of blocks for each stage, or the names of blocks with which stages begin
Split = str | Sequence[int] | Sequence[str]

#: bytes held for each byte of parameters: weight, gradient, and the two moments of Adam
COPIES_OF_PARAMETERS = 4


@dataclass(frozen=True)
class BlockCost:
    """What one block costs on a rank for one microbatch.

    Attributes:
        seconds: forward and backward.
        parameter_bytes: of this rank's shards of its parameters.
        activation_bytes: held from forward to backward.
    """

    seconds: float
    parameter_bytes: int
    activation_bytes: int


def stage_cost(
    split: str,
    elements: Sequence[int],
    costs: Sequence[BlockCost] | None,
    in_flight: Sequence[int] | None,
) -> StageCost:
    """The cost that `split_chain` balances.

    Args:
        split: "parameters", "time" or "memory".
        elements: number of elements of the parameters of each block.
        costs: of each block, for "time" and "memory".
        in_flight: for "memory", the microbatches that each stage holds.
    """
    if split == "parameters":
        parameters = _running_sum(elements)
        return lambda stage, start, stop: parameters[stop] - parameters[start]
    if split not in ("time", "memory"):
        raise ValueError(
            f"split = {split!r}: use 'parameters', 'time', 'memory', a number of blocks for each stage, or the names "
            f"of the blocks with which stages begin"
        )
    assert costs is not None
    assert len(costs) == len(elements)
    if split == "time":
        seconds = _running_sum([cost.seconds for cost in costs])
        return lambda stage, start, stop: seconds[stop] - seconds[start]
    assert in_flight is not None
    held = _running_sum([COPIES_OF_PARAMETERS * cost.parameter_bytes for cost in costs])
    activations = _running_sum([cost.activation_bytes for cost in costs])

    def memory(stage: int, start: int, stop: int) -> float:
        return held[stop] - held[start] + in_flight[stage] * (activations[stop] - activations[start])

    return memory


def _running_sum(values: Sequence[float]) -> list[float]:
    return [0, *itertools.accumulate(values)]


def stated_bounds(split: Sequence[int] | Sequence[str], names: Sequence[str], num_stages: int) -> tuple[int, ...]:
    """Bounds of the stages from the number of blocks of each, or from the blocks with which they begin.

    Raises:
        ValueError: when these do not fit ``names``, the blocks of the model, or the number of stages.
    """
    counts = [item for item in split if isinstance(item, int)]
    begins = [item for item in split if isinstance(item, str)]
    if len(counts) == len(split):
        return _bounds_of_counts(counts, names, num_stages)
    if len(begins) == len(split):
        return _bounds_of_names(begins, names, num_stages)
    raise ValueError(f"split = {list(split)}: give numbers of blocks or names of blocks, not both")


def _bounds_of_counts(counts: Sequence[int], names: Sequence[str], num_stages: int) -> tuple[int, ...]:
    problem = None
    if len(counts) != num_stages:
        problem = f"{len(counts)} numbers for {num_stages} stages"
    elif min(counts) < 1:
        problem = f"every stage needs a block, but stage {counts.index(min(counts))} has {min(counts)}"
    elif sum(counts) != len(names):
        total = " + ".join(map(str, counts))
        problem = f"{total} = {sum(counts)}, but the model has {len(names)} blocks ({name_ranges(names)})"
    if problem:
        raise ValueError(f"split = {list(counts)}: {problem}; give the number of blocks of each stage")
    return (0, *itertools.accumulate(counts))


def _bounds_of_names(begins: Sequence[str], names: Sequence[str], num_stages: int) -> tuple[int, ...]:
    for name in begins:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0)
            raise ValueError(
                f"split = {list(begins)}: no block is named {name!r}; did you mean {near[0]!r}? Blocks are "
                f"{name_ranges(names)}"
            )
    # the first stage can only begin with the first block, so it may be left out
    stated = [*begins] if begins and begins[0] == names[0] else [names[0], *begins]
    if len(stated) != num_stages:
        raise ValueError(
            f"split = {list(begins)} begins {len(stated)} stages (the first begins with {names[0]!r}), but there are "
            f"{num_stages}: name the block with which each stage but the first begins"
        )
    bounds = [names.index(name) for name in stated]
    for (before, low), (after, high) in itertools.pairwise(zip(stated, bounds, strict=True)):
        if high <= low:
            raise ValueError(
                f"split = {list(begins)}: {after!r} does not come after {before!r} in the model ({name_ranges(names)})"
            )
    return (*bounds, len(names))


def name_ranges(names: Sequence[str]) -> str:
    """``embedding, blocks.0 to blocks.3, head``: consecutive numbers are written as a range."""
    ranges: list[tuple[str, str]] = []
    for name in names:
        stem, _, number = name.rpartition(".")
        last_stem, _, last_number = ranges[-1][1].rpartition(".") if ranges else ("", "", "")
        follows = number.isdigit() and last_number.isdigit() and int(number) == int(last_number) + 1
        if ranges and follows and stem == last_stem:
            ranges[-1] = (ranges[-1][0], name)
        else:
            ranges.append((name, name))
    return ", ".join(first if first == last else f"{first} to {last}" for first, last in ranges)
