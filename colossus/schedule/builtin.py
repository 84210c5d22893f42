"""The built-in schedules: registered functions of (stages, microbatches, ...) that return each rank's compute actions.

GPipe is 1811.06965, 1F1B is PipeDream-Flush (2006.09503), interleaved 1F1B is Megatron-LM's (2104.04473), and ZB-H1 and
ZB-V are zero-bubble schedules (2401.10241, 2405.15362).
"""

from __future__ import annotations

import itertools
from collections import Counter

from colossus.registry import SCHEDULES
from colossus.schedule.actions import Action, Actions, Kind
from colossus.schedule.build import bounded, require_counts


@SCHEDULES.register("gpipe")
@bounded(lambda stages, microbatches: [microbatches] * stages)
def gpipe(stages: int, microbatches: int) -> Actions:
    """Run all forwards, then all backwards. Rank r has stage r."""
    return [
        [
            *(Action("forward", stage, index) for index in range(microbatches)),
            *(Action("backward", stage, index) for index in range(microbatches)),
        ]
        for stage in range(stages)
    ]


@SCHEDULES.register("1f1b")
@bounded(lambda stages, microbatches: [min(stages - stage, microbatches) for stage in range(stages)])
def one_f_one_b(stages: int, microbatches: int) -> Actions:
    """Alternate forwards and backwards after a warm-up. Rank r has stage r."""
    out: Actions = []
    for stage in range(stages):
        warm_up = min(stages - stage - 1, microbatches)
        actions = [Action("forward", stage, index) for index in range(warm_up)]
        for index in range(microbatches - warm_up):
            actions.append(Action("forward", stage, warm_up + index))
            actions.append(Action("backward", stage, index))
        actions += [Action("backward", stage, index) for index in range(microbatches - warm_up, microbatches)]
        out.append(actions)
    return out


def _groups(stages: int, microbatches: int) -> list[range]:
    """Return the microbatches of each group, the larger groups first."""
    count = max(1, microbatches // stages)
    size, larger = divmod(microbatches, count)
    starts = [number * size + min(number, larger) for number in range(count + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]


def _warm_up(stages: int, microbatches: int, chunks: int, rank: int) -> int:
    """Return the forwards before the first backward: a group's on all chunks but one, and two per rank that follows."""
    group = len(_groups(stages, microbatches)[0])
    return min(2 * (stages - rank - 1) + (chunks - 1) * group, microbatches * chunks)


def _bound(stages: int, microbatches: int, chunks: int = 2) -> list[int]:
    if stages == 1 or chunks == 1:
        return [min(stages - rank, microbatches) for rank in range(stages)]
    return [min(_warm_up(stages, microbatches, chunks, rank) + 1, microbatches * chunks) for rank in range(stages)]


@SCHEDULES.register("interleaved")
@bounded(_bound)
def interleaved(stages: int, microbatches: int, chunks: int = 2) -> Actions:
    """Alternate forwards and backwards of several stages. Rank r has the ``chunks`` stages r, r + ``stages``, ...

    Raises:
        ValueError: ``chunks`` is not a whole number of at least 1.
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


@SCHEDULES.register("zb-h1")
@bounded(lambda stages, microbatches: [min(stages, microbatches)] * stages)
def zb_h1(stages: int, microbatches: int) -> Actions:
    """Fill the bubble of 1F1B with wgrads, at the memory of 1F1B's first rank. Rank r has stage r."""
    if stages == 1:
        return one_f_one_b(stages, microbatches)
    out: Actions = []
    for stage in range(stages):
        warm_up = min(stages - stage - 1, microbatches)
        actions = [Action("forward", stage, index) for index in range(warm_up)]
        for index in range(microbatches):
            if warm_up + index < microbatches:
                actions.append(Action("forward", stage, warm_up + index))
            actions.append(Action("backward_input", stage, index))
            if index >= stage:
                actions.append(Action("backward_weight", stage, index - stage))
        deferred = range(max(0, microbatches - stage), microbatches)
        out.append([*actions, *(Action("backward_weight", stage, index) for index in deferred)])
    return out


_KINDS: dict[str, Kind] = {"F": "forward", "B": "backward_input", "W": "backward_weight"}


@SCHEDULES.register("zb-v")
@bounded(lambda stages, microbatches: [min(2 * stages, 2 * microbatches) if stages > 1 else 1] * stages)
def zb_v(stages: int, microbatches: int) -> Actions:
    """Pass down all ranks and up again, with wgrads in bubbles. Rank r has the stages r and 2 ``stages`` - 1 - r."""
    if stages == 1:
        return one_f_one_b(stages, microbatches)
    out: Actions = []
    for rank in range(stages):
        chunks = {"d": rank, "u": 2 * stages - 1 - rank}
        next_microbatch: Counter[str] = Counter()
        actions = []
        for letters in _order(stages, rank, max(microbatches, 2 * stages - 1)):
            actions.append(Action(_KINDS[letters[0]], chunks[letters[1]], next_microbatch[letters]))
            next_microbatch[letters] += 1
        out.append([action for action in actions if action.microbatch < microbatches])
    return out


def _order(stages: int, rank: int, microbatches: int) -> list[str]:
    """Return a rank's actions in order: F, B (dgrad) or W (wgrad) of its stage on the way down (d) or up (u).

    Args:
        microbatches: at least 2 ``stages`` - 1; a caller with fewer drops the actions of those that it lacks.
    """
    behind = stages - rank
    down, up = ["Fd", "Bd", "Wd"], ["Fu", "Bu", "Wu"]
    return [
        *["Fd"] * (2 * behind - 1),  # until the first microbatch has come back up to this rank
        *["Fu", "Fd"] * rank,  # until its gradient has come to the stage on the way up
        *up * behind,  # until its gradient has come to the stage on the way down
        *(down + up) * (microbatches - 2 * stages + rank + 1),
        *["Bd", "Wd", *up] * (behind - 1),  # all microbatches have passed this rank downwards
        *["Bd", "Bu"] * rank,
        *["Bd", "Wd"] * behind,
        *["Wu"] * rank,
        *["Wd"] * rank,
    ]
