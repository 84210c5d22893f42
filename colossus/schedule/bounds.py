"""The blocks that each stage of a pipeline runs, by equal numbers of parameters or as the config says. No torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

#: "parameters", the number of blocks of each stage, or "time", which the launcher replaces by such numbers
Split = str | Sequence[int]


def stage_bounds(split: Split, names: Sequence[str], elements: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Return the bounds of the stages: stage s runs the blocks ``bounds[s]`` to ``bounds[s + 1] - 1``.

    Args:
        split: ``parallel.pipeline.split`` of the config.
        names: the names of the model's blocks.
        elements: the number of elements of the parameters of each block.
        num_stages: the number of stages.

    Raises:
        ValueError: there are more stages than blocks, or the split does not fit the model or the number of stages.
    """
    if num_stages > len(names):
        raise ValueError(
            f"{num_stages} stages for {len(names)} blocks ({name_ranges(names)}): every stage needs a block; use at "
            f"most {len(names)} stages (fewer ranks in parallel.pipeline.size, or fewer chunks of the schedule), or "
            f"cut the model into more blocks"
        )
    if not isinstance(split, str):
        return _stated_bounds(split, names, num_stages)
    if split == "time":
        raise ValueError(
            "split = 'time': only `colossus launch` predicts how long blocks take and sets the number of blocks of "
            "each stage; without it, set the numbers that `colossus launch --dry-run` prints"
        )
    if split != "parameters":
        raise ValueError(f"split = {split!r}: use 'parameters', or the number of blocks of each stage")
    return split_chain(tuple(elements), num_stages)


@lru_cache(maxsize=256)
def split_chain(costs: tuple[int, ...], num_stages: int) -> tuple[int, ...]:
    """Return the bounds of stages of contiguous blocks whose costs are as equal as possible.

    Each stage has at least one block. The result is the split whose largest stage cost is smallest; among those, the
    one with the smallest sum of squared costs; among those, the one with the smallest sum of squared numbers of blocks.
    Dynamic programming finds it exactly, in about ``num_stages * num_blocks ** 2 / 2`` steps.

    Costs are compared per stage. Where a rank has several stages, as in interleaved schedules, another split may make
    the sum of a rank's stages smaller; but a pipeline in its steady state waits for its slowest stage.

    Args:
        costs: the cost of each block, at least 0.
        num_stages: the number of stages, at most that of blocks.
    """
    num_blocks = len(costs)
    assert 1 <= num_stages <= num_blocks
    cost_before = [0, *itertools.accumulate(costs)]
    # largest[stop]: the cost of the costliest stage in the best split of the first `stop` blocks; each iteration adds a
    # stage
    largest = [0.0, *[math.inf] * num_blocks]
    for _ in range(num_stages):
        largest = [
            min(
                (max(largest[start], cost_before[stop] - cost_before[start]) for start in range(stop)), default=math.inf
            )
            for stop in range(num_blocks + 1)
        ]
    limit = largest[num_blocks]

    # stop -> (squared costs, squared numbers of blocks, bounds) of the best split of the blocks before it
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, (0,))}
    for num_later in reversed(range(num_stages)):  # stages that follow, each of which needs a block
        following = {}
        for stop in range(num_stages - num_later, num_blocks - num_later + 1):
            options = [
                (squares + (cost_before[stop] - cost_before[start]) ** 2, counts + (stop - start) ** 2, (*bounds, stop))
                for start, (squares, counts, bounds) in best.items()
                if start < stop and cost_before[stop] - cost_before[start] <= limit
            ]
            if options:
                following[stop] = min(options)
        best = following
    return best[num_blocks][2]


def _stated_bounds(counts: Sequence[int], names: Sequence[str], num_stages: int) -> tuple[int, ...]:
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


def name_ranges(names: Sequence[str]) -> str:
    """Return names as text, consecutive numbers as a range: ``embedding, blocks.0 to blocks.3, head``."""
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
