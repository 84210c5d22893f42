"""Whether boxes cover a tensor, each element once. No torch."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

#: start and size of every dim
StartAndSize = tuple[Sequence[int], Sequence[int]]


def is_tiling(shape: Sequence[int], boxes: Sequence[StartAndSize]) -> bool:
    """Whether boxes that lie inside of a shape cover each of its elements once.

    The number of elements alone does not see an overlap beside a hole of the same size. So: the indicator function of a
    box, differenced along every dim, is +1 or -1 at its corners and 0 elsewhere; differencing loses nothing, so boxes
    cover a shape once if and only if their corners add up to those of the shape. Work: boxes x 2^(dims that are split).
    """
    if 0 in shape:
        return all(0 in size for _, size in boxes)
    full = [0] * len(shape)
    split = [
        dim for dim, whole in enumerate(shape) if any(start[dim] != 0 or size[dim] != whole for start, size in boxes)
    ]
    corners: Counter[tuple[int, ...]] = Counter()
    for (start, size), sign in [((full, list(shape)), -1), *((box, 1) for box in boxes)]:
        if 0 in size:
            continue
        for ends in itertools.product((0, 1), repeat=len(split)):
            at = tuple(start[dim] + end * size[dim] for dim, end in zip(split, ends, strict=True))
            corners[at] += sign * (-1) ** sum(ends)
    return not any(corners.values())
