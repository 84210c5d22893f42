"""The checker refuses what would be wrong, hang or hold too much, and names the first bad action."""

from __future__ import annotations

import re
from typing import Any

import pytest
from helpers.drawn import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from colossus.registry import SCHEDULES
from colossus.schedule.actions import COMPUTE, TRANSFERS, Action, Actions
from colossus.schedule.build import complete, make_schedule
from colossus.schedule.check import check
from colossus.schedule.simulate import Deadlock, play, simulate

MICROBATCHES = 3
LISTS: dict[str, Actions] = {
    name: SCHEDULES.get(name)(3, MICROBATCHES) for name in ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v")
}
PLACES = [
    (name, rank, index)
    for name, actions in LISTS.items()
    for rank, own in enumerate(actions)
    for index in range(len(own))
]


def copy(name: str) -> Actions:
    return [list(own) for own in LISTS[name]]


def refusal(actions: Actions, microbatches: int = MICROBATCHES, bound: list[int] | None = None) -> str:
    with pytest.raises(ValueError, match="rank") as caught:
        check(actions, microbatches, bound)
    return str(caught.value)


def compute(*letters: str) -> list[Action]:
    kinds = {"F": "forward", "B": "backward"}
    return [Action(kinds[word[0]], int(word[1]), int(word[2])) for word in letters]  # type: ignore[arg-type]


# -- counting -------------------------------------------------------------------------------------------------


def test_a_dropped_action_is_named() -> None:
    for name, rank, index in PLACES:
        actions = copy(name)
        dropped = actions[rank].pop(index)
        assert refusal(actions) == f"rank {rank}: no {dropped}; add it", name


def test_an_action_on_another_rank_is_named() -> None:
    for name in LISTS:
        actions = copy(name)
        moved = actions[1].pop(2)
        actions[2].insert(0, moved)
        assert f"({moved}): stage {moved.stage} is on rank 1; drop it" in refusal(actions)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            [Action("forwards")],
            "(forwards of microbatch 0 on stage 0): a schedule returns compute",
        ),  # type: ignore[arg-type]
        ([Action("send_activation", 0, 0, 1)], "sends, receives, reductions and the step are added to it"),
        ([Action("step")], "a schedule returns compute actions only"),
        ([Action("forward", -1)], "a stage is a whole number from 0, got -1"),
        ([Action("forward", 0, 3)], "there are 3 microbatches, from 0; drop it"),
        ([Action("forward", 1)], "no rank has stage 0 of 2: give it to one"),
        ([], "rank 0 of 1 has no stage"),
        ([Action("backward"), Action("backward_weight")], "is done already by action 0; drop one of them"),
        ([Action("forward"), Action("backward_input")], "no backward of weights of microbatch 0 on stage 0; add it"),
    ],
)
def test_odd_actions(own: list[Action], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check([own], MICROBATCHES if "3 microbatches" in message else 1)


def test_activations_in_flight_above_the_bound() -> None:
    assert refusal(LISTS["gpipe"], bound=[3, 2, 1]) == (
        "rank 1, action 2 (forward of microbatch 2 on stage 1) makes 3 activations in flight, and the schedule "
        "promises at most 2; put a backward before it"
    )


# -- playing --------------------------------------------------------------------------------------------------


def test_swapped_actions_are_refused_or_still_right() -> None:
    refused = []
    for name, rank, index in PLACES:
        actions = copy(name)
        own = actions[rank]
        if index + 1 == len(own):
            continue
        own[index], own[index + 1] = own[index + 1], own[index]
        try:
            spans = check(actions, MICROBATCHES)
        except ValueError as error:
            refused.append(str(error))
            continue
        # then neither of the two needs the other, and the whole still comes to an end
        assert simulate(complete(spans), blocking=True).makespan > 0
        assert (own[index].stage, own[index].microbatch) != (own[index + 1].stage, own[index + 1].microbatch)
    assert len(refused) > len(PLACES) // 5
    assert all(re.search(r"swap them|move one of the two", error) for error in refused)


def test_compute_actions_that_wait_for_each_other() -> None:
    waiting = [compute("F00", "B00", "F01", "B01"), compute("F11", "F10", "B10", "B11")]
    assert refusal(waiting, 2) == (
        "rank 0, action 1 (backward of microbatch 0 on stage 0) waits for ever for the backward of microbatch 0 on "
        "stage 1: rank 1 has it as action 2, behind rank 1, action 0 (forward of microbatch 1 on stage 1); move one of "
        "the two"
    )


@given(st.data(), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))
@settings(max_examples=examples(60))
def test_any_order_that_can_be_played_gets_transfers_that_do_not_face_each_other(
    data: st.DataObject, ranks: int, chunks: int, microbatches: int
) -> None:
    """Whole and split backwards, stages anywhere: what the check passes ends with sends that block."""
    stages = ranks * chunks
    rank_of = data.draw(st.permutations([stage % ranks for stage in range(stages)]))
    lists: Actions = [[] for _ in range(ranks)]
    for stage in range(stages):
        for index in range(microbatches):
            kinds = data.draw(st.sampled_from([("backward",), ("backward_input", "backward_weight")]))
            lists[rank_of[stage]] += [Action(kind, stage, index) for kind in ("forward", *kinds)]  # type: ignore[arg-type]
    # a random order that respects needs: all ranks draw their next action from those that can be done
    remaining = [action for own in lists for action in own]
    in_order: Actions = [[] for _ in range(ranks)]
    while remaining:
        can = [action for action in remaining if _comes_to_an_end(in_order, rank_of, action)]
        chosen = data.draw(st.sampled_from(can))
        remaining.remove(chosen)
        in_order[rank_of[chosen.stage]].append(chosen)
    full = complete(check(in_order, microbatches))
    assert [[action for action in own if action.kind in COMPUTE] for own in full] == in_order
    play(full, lambda action: 1.0, blocking=True)
    for rank, own in enumerate(full):
        sent = {action.mirror() for other in full for action in other if action.kind in TRANSFERS}
        assert {action for action in own if action.kind in TRANSFERS} <= sent
        assert own[-1] == Action("step")
        assert own.count(Action("step")) == 1
        assert {action.stage for action in own if action.kind == "reduce"} == {
            stage for stage, holder in enumerate(rank_of) if holder == rank
        }


def _comes_to_an_end(done: Actions, rank_of: list[int], action: Action) -> bool:
    """Whether the action may follow what is done, by the definition of a pipeline."""
    found = {(a.kind, a.stage, a.microbatch) for own in done for a in own}
    stage, index = action.stage, action.microbatch

    def has_input_gradient(of: int) -> bool:
        return ("backward", of, index) in found or ("backward_input", of, index) in found

    if action.kind == "forward":
        return stage == 0 or ("forward", stage - 1, index) in found
    if action.kind == "backward_weight":
        return has_input_gradient(stage)
    is_last = stage == len(rank_of) - 1
    return ("forward", stage, index) in found and (is_last or has_input_gradient(stage + 1))


def test_two_sends_that_face_each_other_would_wait_for_ever() -> None:
    """The simulation sees what derived orders avoid: each rank receives right after its send."""
    send, receive = Action("send_activation", 0, 1, 1), Action("send_gradient", 1, 0, 0)
    full = make_schedule("1f1b", 2, 2)
    for own, late in ((full[0], receive.mirror()), (full[1], send.mirror())):
        own.remove(late)
    full[0].insert(full[0].index(send) + 1, receive.mirror())
    full[1].insert(full[1].index(receive) + 1, send.mirror())
    with pytest.raises(Deadlock):
        play(full, lambda action: 1.0, blocking=True)
    assert simulate(full).makespan == 9  # with sends that do not wait it would pass unnoticed


# -- schedules of a user's own --------------------------------------------------------------------------------


def test_compute_actions_are_all_that_a_schedule_gives() -> None:
    def mine(stages: int, microbatches: int) -> Any:
        return [compute("F00", "F01", "B00", "B01"), tuple(compute("F10", "B10", "F11", "B11"))]

    assert make_schedule(mine, 2, 2) == make_schedule("1f1b", 2, 2)

    def full(stages: int, microbatches: int) -> Actions:
        return make_schedule("1f1b", stages, microbatches)

    with pytest.raises(ValueError, match=r"schedule full .*send of the activation .* are added to it"):
        make_schedule(full, 2, 2)
