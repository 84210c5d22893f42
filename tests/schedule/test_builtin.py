"""Every built-in schedule: right for any sizes, as short and as small as its paper says."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.drawn import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from colossus.schedule.actions import COMPUTE, TRANSFERS, Action, Actions, placement
from colossus.schedule.build import make_schedule
from colossus.schedule.simulate import Simulation, Times, simulate

NAMES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v")
SIZES = dict(stages=st.integers(1, 8), microbatches=st.integers(1, 32))


def chunks_of(name: str, stages: int, chunks: int) -> int:
    return {"interleaved": chunks, "zb-v": 2}.get(name, 1) if stages > 1 else 1


def make(name: str, stages: int, microbatches: int, chunks: int = 2) -> Actions:
    options: dict[str, Any] = dict(chunks=chunks) if name == "interleaved" else {}
    return make_schedule(name, stages, microbatches, **options)


def simulated(name: str, stages: int, microbatches: int, chunks: int = 2) -> Simulation:
    """With a stage's time in proportion to its share of the model."""
    actions = make(name, stages, microbatches, chunks)
    share = stages / len(placement(actions))
    return simulate(actions, Times(share, 2 * share, share, share))


def ends(simulation: Simulation) -> dict[tuple[str, int, int], tuple[float, float]]:
    """(kind, stage, microbatch) -> (start, end) of compute actions; a full backward counts as both of a split one."""
    out = {}
    for own in simulation.spans:
        for span in own:
            action = span.action
            kinds = ("backward_input", "backward_weight") if action.kind == "backward" else (action.kind,)
            for kind in kinds:
                if action.kind in COMPUTE:
                    assert (kind, action.stage, action.microbatch) not in out
                    out[kind, action.stage, action.microbatch] = span.start, span.end
    return out


@given(name=st.sampled_from(NAMES), chunks=st.integers(1, 4), **SIZES)
@example(name="interleaved", chunks=4, stages=8, microbatches=32)
@example(name="interleaved", chunks=3, stages=4, microbatches=5)
@example(name="zb-v", chunks=2, stages=8, microbatches=1)
@settings(max_examples=examples(60))
def test_any_size_passes_the_checker_and_keeps_the_order(
    name: str, stages: int, microbatches: int, chunks: int
) -> None:
    """The checker has its say in ``make_schedule``; the times of the simulation are judged here without it."""
    actions = make(name, stages, microbatches, chunks)
    rank_of = placement(actions)
    last = stages * chunks_of(name, stages, chunks) - 1
    assert sorted(rank_of) == list(range(last + 1))
    assert set(rank_of.values()) == set(range(stages))
    for blocking in (False, True):
        at = ends(simulate(actions, Times(transfer=0.25), blocking=blocking))
        assert len(at) == 3 * microbatches * (last + 1)
        for stage in range(last + 1):
            for index in range(microbatches):
                forward, inputs, weights = (
                    at[kind, stage, index] for kind in ("forward", "backward_input", "backward_weight")
                )
                assert forward[1] <= inputs[0] <= weights[0]
                if stage < last:
                    wire = 0.25 * (rank_of[stage] != rank_of[stage + 1])
                    assert at["forward", stage + 1, index][0] >= forward[1] + wire
                    assert inputs[0] >= at["backward_input", stage + 1, index][1] + wire


@given(**SIZES, chunks=st.integers(1, 4))
@settings(max_examples=examples(25))
def test_bubble_of_the_others(stages: int, microbatches: int, chunks: int) -> None:
    one = stages - 1
    if microbatches >= stages > 1:
        found = simulated("interleaved", stages, microbatches, chunks)
        assert found.bubble == pytest.approx(one / (chunks * microbatches + one))
    if microbatches >= stages > 1:
        assert simulated("zb-h1", stages, microbatches).bubble == pytest.approx(one / (3 * microbatches + one))
    if microbatches >= 2 * stages - 1 and stages > 1:
        assert simulated("zb-v", stages, microbatches).bubble == pytest.approx(one / (6 * microbatches + one))
    if stages > 1 and microbatches >= 2 * stages:
        plain = simulated("1f1b", stages, microbatches).bubble
        assert simulated("zb-h1", stages, microbatches).bubble <= plain / 2


@given(**SIZES)
@settings(max_examples=examples(25))
def test_activations_in_flight(stages: int, microbatches: int) -> None:
    ranks = range(stages)
    assert simulated("gpipe", stages, microbatches).peaks == [microbatches] * stages
    assert simulated("1f1b", stages, microbatches).peaks == [min(stages - rank, microbatches) for rank in ranks]
    assert max(simulated("zb-h1", stages, microbatches).peaks) <= min(stages, microbatches)
    assert max(simulated("zb-v", stages, microbatches).peaks) <= 2 * min(stages, microbatches)


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_has_one_stage_and_full_backwards(name: str) -> None:
    """What the engine runs without a pipeline."""
    (own,) = make(name, 1, 3, 1)
    turns = [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1), ("forward", 2), ("backward", 2)]
    if name == "gpipe":
        turns.sort(key=lambda turn: turn[0] != "forward")
    assert own == [*(Action(kind, 0, index) for kind, index in turns), Action("reduce"), Action("step")]


def test_gradients_are_reduced_as_soon_as_they_are_complete() -> None:
    own = make("interleaved", 2, 4, 2)[0]
    between = own[own.index(Action("backward", 2, 3)) + 1 : own.index(Action("reduce", 2))]
    assert Action("send_gradient", 2, 3, 1) in between  # the other rank waits for it
    assert all(action.kind in TRANSFERS for action in between)
    assert own[-2:] == [Action("reduce", 0), Action("step")]


@pytest.mark.parametrize(
    ("kind", "stages", "microbatches", "options", "message"),
    [
        ("1f1b", 0, 4, {}, "stages must be a whole number of at least 1, got 0"),
        ("1f1b", 2, 0, {}, "microbatches must be a whole number of at least 1, got 0"),
        ("1f1b", 2, True, {}, "microbatches must be a whole number of at least 1, got True"),
        ("interleaved", 2, 4, dict(chunks=0), "chunks must be a whole number of at least 1, got 0"),
        ("zb-v", 2, 4, dict(chunks=3), "schedule 'zb-v' takes .stages, microbatches.: .*chunks"),
        ("1f1", 2, 4, {}, "no schedule named '1f1'. Did you mean '1f1b'"),
        (lambda stages, microbatches: None, 2, 4, {}, "must return a list of Action"),
        (lambda stages, microbatches: [[]], 2, 4, {}, "must return a list of Action"),
        (lambda stages, microbatches: [["F0"], []], 2, 4, {}, "must return a list of Action"),
        (lambda stages, microbatches: [[], []], 2, 4, {}, "rank 0 of 2 has no stage"),
    ],
)
def test_wrong_arguments(kind: Any, stages: int, microbatches: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_schedule(kind, stages, microbatches, **options)
