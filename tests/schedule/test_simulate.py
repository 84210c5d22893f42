"""Times, bubbles and memory of schedules small enough to be worked out by hand."""

from __future__ import annotations

from colossus.schedule.build import make_schedule
from colossus.schedule.simulate import Times, simulate

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
    found = simulate(make_schedule("zb-h1", 2, 2))
    assert found.makespan == 7
    assert found.peaks == [2, 2]
