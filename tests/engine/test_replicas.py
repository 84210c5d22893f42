"""Replicas with parameters of their own: what is evaluated and exported, how far apart they are, whose numbers are
told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.strategies import Apart
from helpers.training import assert_close_states, batch_of, config_of
from torch import Tensor

import colossus
from colossus.checkpoint.state_dict import full_state_dict, load_full_state_dict
from colossus.comm import accounting
from colossus.comm.objects import all_gather_object

#: ranks, parallel, and how far the weights of replicas in the average grow with their number
PLANS: dict[str, tuple[int, dict[str, Any], float]] = {
    "data": (3, dict(data=3), 0.25),
    "1d": (4, dict(data=2, tensor=dict(size=2, sequence_sharded=True)), 0.0),
    "pipeline": (4, dict(data=2, pipeline=2), 0.5),
}


def settings_of(parallel: dict[str, Any], precision: Any = "fp64", **more: Any) -> dict[str, Any]:
    return config_of(parallel, 4, precision, train=dict(global_batch_size=12), lr_schedule=dict(warmup_steps=0), **more)


def own_part(engine: Any, step: int) -> dict[str, Tensor]:
    """Of a global batch of 12; sums over replicas are of the whole."""
    size, index = engine.context.size("data"), engine.context.index("data")
    part = 12 // size
    return {key: value[index * part : (index + 1) * part] for key, value in batch_of(step, batch=12).items()}


def stored(engine: Any) -> list[Tensor]:
    return [param.detach().clone() for param in engine.store.parameters()]


def is_same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def whole(engine: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in full_state_dict(engine.model, engine.context, aliases=False).items()}


class Seen:
    """What a rank has seen."""

    losses: list[float]
    distances: dict[str, float]
    inside: dict[str, Tensor]
    own: dict[str, Tensor]


def looks(rank: int, parallel: dict[str, Any], precision: Any, travelling: float, evaluate: str) -> Seen:
    """Trains replicas apart, and evaluates in every way."""
    strategy = dict(type=Apart, travelling=travelling, evaluate=evaluate)
    engine = colossus.initialize(settings_of({**parallel, "strategy": strategy}, precision))
    for step in range(2):
        assert engine.train_step(own_part(engine, step)).replica == engine.context.index("data")
    seen, before = Seen(), stored(engine)
    seen.own = whole(engine)
    assert engine.strategy.consensus() == {}
    seen.losses = [engine.eval_step(own_part(engine, 7)).loss]
    assert is_same(stored(engine), before)
    seen.distances = engine.strategy.consensus()
    with engine.strategy.evaluation():
        with accounting.count() as moved:
            seen.losses.append(engine.eval_step(own_part(engine, 7)).loss)
        assert moved.bytes("data") < 200, "the average is made once around a loop"
        seen.inside = whole(engine)
        if evaluate == "average":
            with pytest.raises(RuntimeError, match="a step cannot be trained inside of"):
                engine.train_step(own_part(engine, 2))
            with pytest.raises(colossus.checkpoint.CheckpointError, match="cannot be saved inside of"):
                engine.checkpoints.save()
    assert is_same(stored(engine), before)
    with pytest.raises(KeyError), engine.strategy.evaluation():
        raise KeyError("in the midst")
    assert is_same(stored(engine), before)
    with engine.strategy.export():
        exported = whole(engine)
    assert is_same(stored(engine), before)
    first = all_gather_object(seen.own, engine.context.group("data"))[0]
    assert_close_states(exported, seen.inside if evaluate == "average" else first, "export", atol=0.0)
    engine.train_step(own_part(engine, 2))
    assert engine.strategy.consensus() == {}
    engine.close()
    return seen


def evaluates(rank: int, precision: Any, state: dict[str, Tensor]) -> float:
    engine = colossus.initialize(settings_of({}, precision))
    load_full_state_dict(engine.model, state, engine.context)
    loss = engine.eval_step(batch_of(7, batch=12)).loss
    engine.close()
    return loss


@pytest.mark.parametrize("plan", PLANS)
def test_the_average_is_evaluated_and_the_own_come_back(plan: str) -> None:
    world, parallel, travelling = PLANS[plan]
    ranks = run_ranks(world, looks, parallel, "fp64", travelling, "average", with_context=False)
    num = parallel["data"]
    of_replicas = [seen.own for seen in (ranks[:: world // num] if plan != "pipeline" else ranks[:num])]
    weights = [1 + travelling * index for index in range(num)]
    mean = {
        name: sum(weight * own[name] for weight, own in zip(weights, of_replicas, strict=True)) / sum(weights)
        for name in of_replicas[0]
    }
    (loss,) = run_ranks(1, evaluates, "fp64", mean, with_context=False)
    (own_loss,) = run_ranks(1, evaluates, "fp64", of_replicas[0], with_context=False)
    assert abs(own_loss - loss) > 1e-6
    norm = sum(value.square().sum().item() for value in mean.values()) ** 0.5
    squares = [sum((own[name] - value).square().sum().item() for name, value in mean.items()) for own in of_replicas]
    distance = (sum(squares) / num) ** 0.5
    for seen in ranks:
        assert seen.losses == pytest.approx([loss, loss], rel=1e-12)
        assert_close_states(seen.inside, mean, "average", atol=1e-14)
        assert seen.distances["consensus_distance"] == pytest.approx(distance, rel=1e-9)
        assert seen.distances["consensus_distance_relative"] == pytest.approx(distance / norm, rel=1e-9)
