"""Copies of parameters that differ between ranks are found and named; the check changes nothing of a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.long import long
from helpers.ranks import run_ranks
from helpers.training import batch_of, config_of
from torch import Tensor

import colossus
from colossus.engine import ReplicasDiffer
from colossus.engine.replica_check import checksum
from colossus.engine.rollback import Rollback
from colossus.layout.split_parameter import as_shards

STEPS, BAD = 4, 2
NORM, EMBEDDING = "blocks.1.mlp_norm.weight", "embedding.weight"


def _flip(x: Tensor) -> None:
    """One bit, the last of the first element."""
    with as_shards():
        x.detach().view(torch.int32).flatten()[0] ^= 1


def _train(rank: int, plan: dict[str, Any], every: int, name: str, bad_rank: int) -> tuple[Any, ...]:
    """Losses, parameters and the error of a run in which a bit of a parameter flips on one rank after step BAD."""
    more = dict(train=dict(check_replicas_every=every), schedule=dict(microbatches=2))
    engine = colossus.initialize(config_of(plan, STEPS, "fp32", **more))
    losses: list[float] = []
    share = 8 // engine.context.size("data")
    first = engine.context.index("data") * share
    for step in range(STEPS):
        batch = {key: value[first : first + share] for key, value in batch_of(step).items()}
        try:
            losses.append(engine.train_step(batch).loss)
        except ReplicasDiffer as error:
            with pytest.raises(RuntimeError, match="an earlier step"):
                engine.train_step(batch)
            return step + 1, error.parameters, str(error)
        if step + 1 == BAD and rank == bad_rank:
            _flip(dict(engine.model.named_parameters())[name])
    params = [param.detach().clone() for param in engine.model.parameters()]
    engine.close()
    return losses, params


@pytest.mark.rest("plan1-2-blocks.1.mlp_norm.weight-2-told1")
@pytest.mark.parametrize(
    ("plan", "every", "name", "bad_rank", "told"),
    [
        (dict(data=2), 1, NORM, 1, ["rank 1 (checksum ", "against rank 0 (checksum ", "it is unknown which"]),
        (dict(data=4), 2, NORM, 2, ["rank 2 (checksum ", "against ranks 0, 1, 3 (checksum "]),
        (dict(tensor=2), 1, NORM, 0, ["rank 0"]),
        (dict(pipeline=2), 1, EMBEDDING, 1, ["rank 1"]),
        (dict(tensor=2, data=2, zero=1), 1, NORM, 0, ["rank 0", "rank 1"]),
    ],
)
def test_a_bit_that_flips_is_named(plan: dict[str, Any], every: int, name: str, bad_rank: int, told: list[str]) -> None:
    world = plan.get("data", 1) * plan.get("tensor", 1) * plan.get("pipeline", 1)
    found = run_ranks(world, _train, plan, every, name, bad_rank, with_context=False)
    assert all(each == found[0] for each in found)
    step, parameters, message = found[0]
    assert step == BAD + every
    assert name in parameters
    assert f"after step {step} copies of parameters differ" in message
    assert all(words in message for words in told), message


@pytest.mark.parametrize("plan", [*long(dict(data=2, tensor=2)), dict(pipeline=2, data=2)])
def test_a_check_changes_nothing(plan: dict[str, Any]) -> None:
    def body(rank: int) -> list[Any]:
        return [_train(rank, plan, every, NORM, -1) for every in (1, 0)]

    for (losses, params), (same, others) in run_ranks(4, body, with_context=False):
        assert losses == same
        assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


def _agreed(rank: int, first: int) -> Any:
    """How far a run goes back that began behind step ``first``: copies are compared every 3 steps, a bit flips behind
    the first comparison, or the first step."""
    more = dict(train=dict(check_replicas_every=3, on_mismatch="restart"))
    engine = colossus.initialize(config_of(dict(data=2), 9, "fp32", **more))
    engine.run.completed_steps = first
    for step in range(first, 5):
        engine.train_step({key: value[:4] for key, value in batch_of(step).items()})
    if rank == 1:
        _flip(dict(engine.model.named_parameters())[NORM])
    with pytest.raises(ReplicasDiffer) as error:
        engine.train_step({key: value[:4] for key, value in batch_of(5).items()})
    assert f"It began after step {error.value.rollback.until}: " in str(error.value)
    return error.value.rollback


@pytest.mark.parametrize(("first", "until"), [(0, 3), (4, 4)])
def test_a_run_goes_back_behind_what_was_known_to_agree(first: int, until: int) -> None:
    assert run_ranks(2, _agreed, first, with_context=False) == [Rollback(until)] * 2


def test_a_plan_without_copies_is_refused() -> None:
    with pytest.raises(AssertionError, match="under this plan no parameter has a copy on another rank"):
        run_ranks(2, _train, dict(data=2, zero=1), 1, NORM, -1, with_context=False)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.float64, torch.complex128])
def test_a_checksum_sees_bits_and_places(dtype: torch.dtype) -> None:
    x = torch.arange(12).remainder(2).to(dtype).reshape(3, 4)
    assert checksum(x) == checksum(x.clone())
    assert checksum(x) != checksum(x.flip(1))
    assert checksum(torch.tensor(0.0)) != checksum(torch.tensor(-0.0))
