"""Schedules that a user writes: compute actions are enough, and an error says what is wrong with them."""

from __future__ import annotations

import pytest

from colossus.schedule.actions import Action, Actions
from colossus.schedule.build import bounded, complete, make_schedule


def compute(*letters: str) -> list[Action]:
    kinds = {"F": "forward", "B": "backward"}
    return [Action(kinds[word[0]], int(word[1]), int(word[2])) for word in letters]  # type: ignore[arg-type]


def test_compute_actions_alone_will_do() -> None:
    def mine(stages: int, microbatches: int) -> Actions:
        return [compute("F00", "F01", "B00", "B01"), compute("F10", "B10", "F11", "B11")]

    assert make_schedule(mine, 2, 2) == make_schedule("1f1b", 2, 2)


def test_compute_actions_that_wait_for_each_other() -> None:
    waiting = [compute("F00", "B00", "F01", "B01"), compute("F11", "F10", "B10", "B11")]
    with pytest.raises(ValueError, match="rank 0") as caught:
        complete(waiting)
    assert str(caught.value) == (
        "rank 0, action 1 (backward of microbatch 0 on stage 0) waits for ever for the backward of microbatch 0 on "
        "stage 1: rank 1 has it as action 2, behind rank 1, action 0 (forward of microbatch 1 on stage 1); move one of "
        "the two"
    )


def test_the_index_is_that_of_the_list_as_it_was_given() -> None:
    """Rank 0 is through with stage 3, so its reduction has been put in, when it comes to a halt."""
    with pytest.raises(ValueError, match="rank 0") as caught:
        complete([compute("F10", "F30", "B30", "B10"), compute("F00", "F20", "B00", "B20")])
    assert str(caught.value) == (
        "rank 0, action 3 (backward of microbatch 0 on stage 1) waits for ever for the backward of microbatch 0 on "
        "stage 2: rank 1 has it as action 3, behind rank 1, action 2 (backward of microbatch 0 on stage 0); move one "
        "of the two"
    )


def test_a_schedule_that_forgets_is_told_by_its_name() -> None:
    def forgetful(stages: int, microbatches: int) -> Actions:
        return [compute("F00", "F01", "B00", "B01"), compute("F10", "B10", "F11")]

    with pytest.raises(ValueError, match="forgetful") as caught:
        make_schedule(forgetful, 2, 2)
    assert str(caught.value) == (
        "schedule forgetful (stages=2, microbatches=2): rank 1, end of the list (action 3): no backward of "
        "microbatch 1 on stage 1; add it"
    )


def test_a_bound_of_ones_own() -> None:
    @bounded(lambda stages, microbatches: [1] * stages)
    def greedy(stages: int, microbatches: int) -> Actions:
        return make_schedule("gpipe", stages, microbatches)

    with pytest.raises(ValueError, match="makes 2 activations in flight, and the schedule promises at most 1"):
        make_schedule(greedy, 2, 2)
