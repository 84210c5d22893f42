"""Times, bubbles and memory of schedules small enough to be worked out by hand."""

from __future__ import annotations

import pytest

from colossus.schedule.actions import COMPUTE
from colossus.schedule.build import make_schedule
from colossus.schedule.simulate import Times, play, simulate

TWO = make_schedule("1f1b", 2, 2)


def times_of(rank: int, *, blocking: bool = False, **times: float) -> dict[str, tuple[float, float]]:
    spans = simulate(TWO, Times(**times), blocking=blocking).spans[rank]  # type: ignore[arg-type]
    return {
        f"{span.action.kind[0].upper()}{span.action.microbatch}": (span.start, span.end)
        for span in spans
        if span.action.kind in ("forward", "backward")
    }


def test_two_ranks_two_microbatches() -> None:
    assert times_of(0) == {"F0": (0, 1), "F1": (1, 2), "B0": (4, 6), "B1": (7, 9)}
    assert times_of(1) == {"F0": (1, 2), "B0": (2, 4), "F1": (4, 5), "B1": (5, 7)}


def test_a_transfer_takes_time_on_the_wire_only() -> None:
    assert times_of(0, transfer=1) == {"F0": (0, 1), "F1": (1, 2), "B0": (6, 8), "B1": (9, 11)}
    assert times_of(1, transfer=1) == {"F0": (2, 3), "B0": (3, 5), "F1": (5, 6), "B1": (6, 8)}


def test_a_blocking_transfer_holds_both_ranks() -> None:
    assert times_of(0, transfer=1, blocking=True)["F1"] == (2, 3)
    # the gradient of microbatch 0 and the activation of microbatch 1 pass each other one after the other
    assert times_of(1, transfer=1, blocking=True) == {"F0": (2, 3), "B0": (4, 6), "F1": (7, 8), "B1": (8, 10)}


def test_weights_hold_their_activation_until_they_have_their_gradient() -> None:
    simulation = simulate(make_schedule("zb-h1", 2, 2))
    assert simulation.makespan == 7
    assert simulation.peaks == [2, 2]


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("at_once", [1, 2, 3, 4])
def test_ranks_that_share_cores_take_turns(kind: str, at_once: int) -> None:
    actions, times = make_schedule(kind, 4, 6), Times(transfer=0.25)
    spans = play(actions, times.of, transfer=times.transfer, at_once=at_once)
    assert [[span.action for span in own] for own in spans] == [list(own) for own in actions]
    computing = sorted((s.start, s.end) for own in spans for s in own if s.action.kind in COMPUTE)
    assert all(sum(begin <= start < end for begin, end in computing) <= at_once for start, _ in computing)
    work, end = sum(end - start for start, end in computing), max(own[-1].end for own in spans)
    alone = simulate(actions, times).makespan
    assert max(alone, work / at_once) <= end <= alone + work / at_once  # never idle while a rank could start (Graham)
    assert end == alone or at_once < 4
