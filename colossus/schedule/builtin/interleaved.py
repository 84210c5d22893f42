"""Interleaved 1F1B (Megatron, 2104.04473): each rank has several stages, so the pipeline fills with smaller ones.

Microbatches go in groups; a group passes all chunks of a rank before the next group starts. The paper's groups have
one microbatch per rank, so the number of microbatches has to divide by that of ranks. Here groups are as equal as can
be and have at least that many, which keeps the paper's bubble, (p - 1) / (chunks m + p - 1) for p ranks, at any number
of microbatches m >= p, for a little more memory.
"""

from __future__ import annotations

import itertools

from colossus.registry import SCHEDULES
from colossus.schedule.actions import Action, Actions
from colossus.schedule.build import bounded, require_counts
from colossus.schedule.builtin.one_f_one_b import one_f_one_b


def _groups(stages: int, microbatches: int) -> list[range]:
    """The microbatches of each group, the larger groups first."""
    count = max(1, microbatches // stages)
    size, larger = divmod(microbatches, count)
    starts = [number * size + min(number, larger) for number in range(count + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]


def _warm_up(stages: int, microbatches: int, chunks: int, rank: int) -> int:
    """Forwards before the first backward: a group's on all chunks but one, and two for each rank that follows."""
    group = len(_groups(stages, microbatches)[0])
    return min(2 * (stages - rank - 1) + (chunks - 1) * group, microbatches * chunks)


def _bound(stages: int, microbatches: int, chunks: int = 2) -> list[int]:
    if stages == 1 or chunks == 1:
        return [min(stages - rank, microbatches) for rank in range(stages)]
    return [min(_warm_up(stages, microbatches, chunks, rank) + 1, microbatches * chunks) for rank in range(stages)]


@SCHEDULES.register("interleaved")
@bounded(_bound)
def interleaved(stages: int, microbatches: int, chunks: int = 2) -> Actions:
    """Rank r has the stages r, r + ``stages``, r + 2 ``stages``, ...: ``chunks`` of them.

    Raises:
        ValueError: when ``chunks`` is not a whole number of at least 1.
    """
    require_counts(chunks=chunks)
    if stages == 1 or chunks == 1:
        return one_f_one_b(stages, microbatches)
    groups = _groups(stages, microbatches)
    forward_order = [(chunk, index) for group in groups for chunk in range(chunks) for index in group]
    backward_order = [(chunk, index) for group in groups for chunk in reversed(range(chunks)) for index in group]
    out: Actions = []
    for rank in range(stages):
        forwards = [Action("forward", chunk * stages + rank, index) for chunk, index in forward_order]
        backwards = [Action("backward", chunk * stages + rank, index) for chunk, index in backward_order]
        warm_up = _warm_up(stages, microbatches, chunks, rank)
        steady = [action for pair in zip(forwards[warm_up:], backwards, strict=False) for action in pair]
        out.append([*forwards[:warm_up], *steady, *backwards[len(forwards) - warm_up :]])
    return out
