"""The checker refuses what would be wrong, hang or hold too much, and names the first bad action."""

from __future__ import annotations

import re

import pytest

from colossus.schedule.actions import COMPUTE, TRANSFERS, Action, Actions
from colossus.schedule.build import make_schedule
from colossus.schedule.check import check
from colossus.schedule.simulate import simulate

MICROBATCHES = 3
SCHEDULES = {name: make_schedule(name, 3, MICROBATCHES) for name in ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v")}
PLACES = [
    (name, rank, index)
    for name, actions in SCHEDULES.items()
    for rank, own in enumerate(actions)
    for index in range(len(own))
]


def copy(name: str) -> Actions:
    return [list(own) for own in SCHEDULES[name]]


def located_error(actions: Actions, microbatches: int = MICROBATCHES, bound: list[int] | None = None) -> str:
    with pytest.raises(ValueError, match="rank") as caught:
        check(actions, microbatches, bound)
    return str(caught.value)


def problem_of(actions: Actions) -> str | None:
    try:
        check(actions, MICROBATCHES)
    except ValueError as error:
        return str(error)
    return None


def test_a_dropped_action_is_named() -> None:
    for name, rank, index in PLACES:
        actions = copy(name)
        dropped = actions[rank].pop(index)
        message = located_error(actions)
        assert message.startswith(f"rank {rank}, "), (name, dropped, message)
        assert str(dropped) in message, (name, dropped, message)


def test_an_action_done_twice_is_named() -> None:
    for name, rank, index in PLACES:
        actions = copy(name)
        action = actions[rank][index]
        actions[rank].insert(index + 1, action)
        message = located_error(actions)
        assert message.startswith(f"rank {rank}, action {index + 1} ({action}) "), (name, message)
        assert "comes after the step" in message or f"is done already by action {index}; drop one" in message


def test_swapped_actions_are_refused_or_still_right() -> None:
    refused = 0
    for name, rank, index in PLACES:
        actions = copy(name)
        own = actions[rank]
        if index + 1 == len(own):
            continue
        own[index], own[index + 1] = own[index + 1], own[index]
        if problem := problem_of(actions):
            refused += 1
            assert "rank" in problem
            assert "action" in problem
            continue
        # then neither of the two needs the other, and the whole still comes to an end
        assert simulate(actions, blocking=True).makespan > 0
        pair = own[index : index + 2]
        assert not any(action.kind == "step" for action in pair)
        if pair[0].stage == pair[1].stage and pair[0].microbatch == pair[1].microbatch:
            assert any(action.kind in TRANSFERS | {"reduce"} for action in pair), pair
    assert refused > len(PLACES) // 3


def test_an_action_on_another_rank_is_named() -> None:
    for name in SCHEDULES:
        actions = copy(name)
        moved = actions[1].pop(2)
        actions[2].insert(0, moved)
        assert f"({moved})" in located_error(actions)


def naive(actions: Actions) -> Actions:
    """Receive right before it is needed, send as soon as it is there: what one writes first."""
    out = []
    for own in actions:
        receives = {
            (a.kind, a.stage, a.microbatch): a for a in own if a.kind in ("receive_activation", "receive_gradient")
        }
        sends = {(a.kind, a.stage, a.microbatch): a for a in own if a.kind in ("send_activation", "send_gradient")}
        new = []
        for action in own:
            if action.kind in TRANSFERS:
                continue
            what = "activation" if action.kind == "forward" else "gradient"
            if action.kind in COMPUTE:
                new += [
                    receives[key] for key in [(f"receive_{what}", action.stage, action.microbatch)] if key in receives
                ]
            new.append(action)
            if action.kind in COMPUTE:
                new += [sends[key] for key in [(f"send_{what}", action.stage, action.microbatch)] if key in sends]
        out.append(new)
    return out


def test_two_sends_that_face_each_other() -> None:
    actions = naive(make_schedule("1f1b", 2, 2))
    assert located_error(actions, 2) == (
        "rank 0, action 3 (send of the activation of microbatch 1 from stage 0 to stage 1) waits for ever for "
        "rank 1, action 3 (send of the gradient of microbatch 0 from stage 1 to stage 0), which waits for rank 0. "
        "A send ends when it is received: let one of them come after what the other waits for, or leave out all sends "
        "and receives, and they are put in"
    )
    # with sends that do not wait it would pass unnoticed
    assert simulate(actions).makespan == 9


def test_the_naive_order_hangs_wherever_values_go_both_ways() -> None:
    for ranks in range(2, 6):
        for microbatches in range(2, 6):
            assert "waits for ever" in located_error(naive(make_schedule("1f1b", ranks, microbatches)), microbatches)


def test_values_in_another_order_than_awaited() -> None:
    actions = make_schedule("gpipe", 2, 2)
    first, second = (actions[1].index(Action("receive_activation", 1, index, 0)) for index in range(2))
    actions[1][first], actions[1][second] = actions[1][second], actions[1][first]
    message = located_error(actions, 2)
    assert "rank 1" in message
    assert "action" in message


def test_activations_in_flight_above_the_bound() -> None:
    message = located_error(SCHEDULES["gpipe"], bound=[3, 2, 1])
    assert message == (
        "rank 1, action 7 (forward of microbatch 2 on stage 1) makes 3 activations in flight, and the schedule "
        "promises at most 2; put a backward before it"
    )


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (["forward"], "rank 0, action 0 (forward): no action; make it with Action(kind, stage, microbatch)"),
        ([Action("forwards", 0, 0)], "no action; make it with Action"),  # type: ignore[arg-type]
        ([Action("forward", 0, 7)], "there are 3 microbatches, from 0; drop it"),
        ([Action("forward", -1, 0)], "a stage is a whole number from 0, got -1"),
        ([Action("forward", 1, 0)], "no rank has stage 0 of 2: give it to one"),
        ([Action("forward", 0, 0, peer=1)], "only sends and receives have a peer"),
        ([Action("forward"), Action("send_activation", 0, 0, peer=2)], "the stage at the other end is 1: peer=1"),
        ([Action("forward"), Action("send_activation", 0, 0, peer=1)], "stage 1 is no stage; drop it"),
        ([Action("forward"), Action("step", 3)], "a step is for all microbatches and stages; leave them out"),
        ([Action("forward"), Action("reduce", 2)], "stage 2 is computed by no rank; drop it"),
        (
            [Action("forward"), Action("backward"), Action("backward_weight")],
            "rank 0, action 2 (backward of weights of microbatch 0 on stage 0) is done already by action 1",
        ),
        (
            [Action("forward"), Action("backward_input"), Action("backward")],
            "rank 0, action 2 (backward of microbatch 0 on stage 0) is done already by action 1",
        ),
        (
            [Action("forward"), Action("backward_weight"), Action("backward_input")],
            "needs the backward of inputs of microbatch 0 on stage 0 before it, which is action 2; swap them",
        ),
    ],
)
def test_odd_actions(own: list[Action], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check([own], MICROBATCHES)


def test_stages_and_ranks_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="rank 1 of 2 has no stage: give it one, or use fewer ranks"):
        check([[Action("forward")], []], 1)
    message = located_error([[Action("forward", 0, 0)], [Action("forward", 0, 1)]])
    assert message.startswith("rank 1, action 0 (forward of microbatch 1 on stage 0): stage 0 is on rank 0")


def test_how_actions_look() -> None:
    assert repr(Action("forward", 1, 3)) == "forward(stage=1, microbatch=3)"
    assert repr(Action("send_gradient", 2, 3, 1)) == "send_gradient(stage=2, microbatch=3, peer=1)"
    assert [repr(Action("reduce", 1)), repr(Action("step"))] == ["reduce(stage=1)", "step()"]
