"""Splits a chain of blocks into contiguous stages whose costs are as equal as they can be. No torch."""

from __future__ import annotations

from collections.abc import Callable

#: (stage, start, stop) -> what the stage costs when it runs blocks start to stop - 1
StageCost = Callable[[int, int, int], float]


def split_chain(cost: StageCost, num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Bounds of the stages: stage s runs blocks ``bounds[s]`` to ``bounds[s + 1] - 1``, at least one.

    Of all such splits the one whose largest stage cost is smallest; among those, the one with the smallest sum of
    squared costs; among those, the one with the smallest sum of squared numbers of blocks. It is found exactly, by
    dynamic programming, in ``num_stages * num_blocks ** 2 / 2`` evaluations of the cost.

    Costs are compared per stage. Where a rank has several stages, as in interleaved schedules, another split may make
    the sum of a rank's stages smaller; but a pipeline in its steady state waits for its slowest stage.

    Args:
        cost: may depend on the stage: one that holds more microbatches needs more memory.

    Raises:
        ValueError: for more stages than blocks, or none.
    """
    if not 1 <= num_stages <= num_blocks:
        raise ValueError(f"{num_blocks} blocks cannot be cut into {num_stages} stages of at least one block each")
    ranges = [_block_ranges(stage, num_blocks, num_stages) for stage in range(num_stages)]
    costs = [{blocks: cost(stage, *blocks) for blocks in own} for stage, own in enumerate(ranges)]
    limit = _smallest_limit(costs, num_blocks)

    # stop -> (squared costs, squared numbers of blocks, bounds) of the best split of the blocks before it
    best: dict[int, tuple[float, int, tuple[int, ...]]] = {0: (0, 0, (0,))}
    for own in costs:
        following: dict[int, tuple[float, int, tuple[int, ...]]] = {}
        for (start, stop), value in own.items():
            if value > limit or start not in best:
                continue
            squares, counts, bounds = best[start]
            candidate = (squares + value * value, counts + (stop - start) ** 2, (*bounds, stop))
            if stop not in following or candidate < following[stop]:
                following[stop] = candidate
        best = following
    return best[num_blocks][2]


def _block_ranges(stage: int, num_blocks: int, num_stages: int) -> list[tuple[int, int]]:
    """(start, stop) of the blocks that a stage may run so that every stage before and after it has a block."""
    last = num_blocks - (num_stages - stage - 1)
    starts = range(stage, last) if stage else range(1)
    stops = range(stage + 1, last + 1) if stage < num_stages - 1 else range(num_blocks, num_blocks + 1)
    return [(start, stop) for start in starts for stop in stops if start < stop]


def _smallest_limit(costs: list[dict[tuple[int, int], float]], num_blocks: int) -> float:
    """The largest stage cost of the split where that is smallest."""
    best: dict[int, float] = {}
    for stage, own in enumerate(costs):
        following: dict[int, float] = {}
        for (start, stop), value in own.items():
            if stage and start not in best:
                continue
            largest = max(best[start], value) if stage else value
            if stop not in following or largest < following[stop]:
                following[stop] = largest
        best = following
    return best[num_blocks]
