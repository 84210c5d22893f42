"""Replicas with parameters of their own: what is evaluated and exported, how far apart they are, whose numbers are
told."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.long import but
from helpers.ranks import run_ranks
from helpers.strategies import Apart
from helpers.training import assert_close_states, batch_of, config_of
from torch import Tensor, nn

import colossus
from colossus.comm import accounting
from colossus.engine.fit import FitSummary, Hook, fit
from colossus.layout.split_parameter import as_shards
from colossus.monitor.display import Display
from colossus.monitor.metrics import Metrics
from colossus.state.model_state_dict import full_state_dict, load_full_state_dict

#: ranks, parallel, and how far the weights of replicas in the average grow with their number
PLANS: dict[str, tuple[int, dict[str, Any], float]] = {
    "data": (3, dict(data=3), 0.25),
    "1d": (4, dict(data=2, tensor=dict(size=2, sequence_sharded=True)), 0.0),
    "pipeline": (4, dict(data=2, pipeline=2), 0.5),
    "sequence": (4, dict(data=2, sequence=2), 0.0),
    "2d": (8, dict(data=2, tensor=dict(size=4, mode="2d")), 0.25),
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
    with as_shards():
        return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def whole(engine: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in full_state_dict(engine.model, engine.context, aliases=False).items()}


class RecordedReplica:
    """What a rank has seen."""

    losses: list[float]
    distances: dict[str, float]
    inside: dict[str, Tensor]
    own: dict[str, Tensor]


def looks(rank: int, parallel: dict[str, Any], precision: Any, travelling: float) -> RecordedReplica:
    """Trains replicas apart, and evaluates their average."""
    strategy = dict(type=Apart, travelling=travelling)
    engine = colossus.initialize(settings_of({**parallel, "strategy": strategy}, precision))
    for step in range(2):
        assert engine.train_step(own_part(engine, step)).replica == engine.context.index("data")
    record, before = RecordedReplica(), stored(engine)
    record.own = whole(engine)
    assert engine.strategy.consensus() == {}
    record.losses = [engine.eval_step(own_part(engine, 7)).loss]
    assert is_same(stored(engine), before)
    record.distances = engine.strategy.consensus()
    with engine.strategy.evaluation():
        with accounting.count() as moved:
            record.losses.append(engine.eval_step(own_part(engine, 7)).loss)
        assert moved.bytes("data") < 200, "the average is made once around a loop"
        record.inside = whole(engine)
        with pytest.raises(RuntimeError, match="no step can be trained inside of"):
            engine.train_step(own_part(engine, 2))
        with pytest.raises(colossus.checkpoint.CheckpointError, match="no checkpoint can be saved or loaded inside of"):
            engine.checkpoints.save()
    assert is_same(stored(engine), before)
    with pytest.raises(KeyError), engine.strategy.evaluation():
        raise KeyError("in the midst")
    assert is_same(stored(engine), before)
    with engine.strategy.export():
        exported = whole(engine)
    assert is_same(stored(engine), before)
    assert_close_states(exported, record.inside, "export", atol=0.0)
    engine.train_step(own_part(engine, 2))
    assert engine.strategy.consensus() == {}
    engine.close()
    return record


def evaluates(rank: int, precision: Any, state: dict[str, Tensor]) -> float:
    engine = colossus.initialize(settings_of({}, precision))
    load_full_state_dict(engine.model, state, engine.context)
    loss = engine.eval_step(batch_of(7, batch=12)).loss
    engine.close()
    return loss


@pytest.mark.parametrize("plan", but(("1d", "2d", "data", "sequence"), PLANS))
def test_the_average_is_evaluated_and_the_own_come_back(plan: str) -> None:
    world, parallel, travelling = PLANS[plan]
    ranks = run_ranks(world, looks, parallel, "fp64", travelling, with_context=False)
    num = parallel["data"]
    of_replicas = [record.own for record in (ranks[:: world // num] if plan != "pipeline" else ranks[:num])]
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
    for record in ranks:
        assert record.losses == pytest.approx([loss, loss], rel=1e-12)
        assert_close_states(record.inside, mean, "average", atol=1e-14)
        assert record.distances["consensus_distance"] == pytest.approx(distance, rel=1e-9)
        assert record.distances["consensus_distance_relative"] == pytest.approx(distance / norm, rel=1e-9)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(3), nn.Linear(3, 2)
        self.register_buffer("scale", torch.tensor([0.1, 0.7]))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x)) * self.scale


def squares(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return (outputs - batch["labels"]).square().sum(), len(outputs)


def statistics(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    config = dict(
        parallel=dict(data=3, strategy=dict(type=Apart)),
        train=dict(steps=2, global_batch_size=9, precision="fp64"),
        optimizer=dict(type="SGD", lr=0.1),
        device="cpu",
    )
    engine = colossus.initialize(config, model=Normed, loss_fn=squares)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    engine.train_step({"inputs": x, "labels": torch.zeros(3, 2, dtype=torch.float64)})
    own = [buffer.clone() for buffer in engine.model.buffers()]
    with engine.strategy.evaluation():
        inside = engine.model.norm.running_var.clone()
        assert torch.equal(engine.model.scale, own[0]), "what is the same in all stays so to the bit"
        assert engine.model.norm.num_batches_tracked == 1
    assert is_same(list(engine.model.buffers()), own)
    plain = colossus.plain(engine)
    assert plain is not None
    engine.close()
    return engine.model.norm.running_var.clone(), inside, plain.norm.running_var  # type: ignore[return-value,union-attr]


def test_running_statistics_are_averaged() -> None:
    ranks = run_ranks(3, statistics, with_context=False)
    mean = sum(own for own, _, _ in ranks) / 3
    for own, inside, exported in ranks:
        torch.testing.assert_close(inside, mean, rtol=1e-14, atol=0)
        torch.testing.assert_close(exported, mean, rtol=1e-14, atol=0)
        assert not torch.allclose(own, mean, rtol=1e-3)


# -- whose numbers are told --------------------------------------------------------------------------------------


class StopsAfter(Hook):
    """One rank asks to stop."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.results: list[Any] = []

    def on_step_end(self, engine: Any, result: Any) -> None:
        self.results.append(result)
        if result.step == self.step and engine.context.rank == 1:
            engine.request_stop()


def fits(rank: int, folder: Path, stops_after: int) -> tuple[list[tuple[float, ...]], str, FitSummary, list[Any]]:
    config = settings_of(dict(data=2, strategy=dict(type=Apart, log_every=2)))
    config["train"] |= dict(log_every=1, steps=6)
    engine = colossus.initialize(config)
    batches = [own_part(engine, step) for step in range(6)]
    engine.loaders = SimpleNamespace(train=batches, validation=None, validation_missing="", description="made here")  # type: ignore[assignment]
    watched, screen, path = StopsAfter(stops_after), io.StringIO(), folder / f"{rank}.jsonl"
    summary = fit(engine, [Metrics(path), Display(folder, screen), watched])
    engine.close()
    numbers = []
    for result in watched.results:
        numbers.append((result.replica, result.loss, result.tokens, result.grad_norm, result.replica_tokens))
    rows = [json.loads(line) for line in path.read_text().splitlines()] if rank == 0 else []
    return numbers, screen.getvalue(), summary, rows


def test_own_numbers_are_marked(tmp_path: Path) -> None:
    """At logging steps and the last they are of all replicas, else of one, and say so."""
    (one, text, summary, rows), (other, _, its_summary, _) = run_ranks(2, fits, tmp_path, 0, with_context=False)
    lines = [line for line in text.splitlines() if line.startswith("step")]
    assert [numbers[0] for numbers in one] == [0, None, 0, None, 0, None]
    assert [numbers[0] for numbers in other] == [1, None, 1, None, 1, None]
    for row, line, mine, theirs in zip(rows, lines, one, other, strict=True):
        replica, loss, tokens, norm, own = mine
        assert own + theirs[4] == int((batch_of(row["step"] - 1, batch=12)["labels"] != -100).sum())
        assert tokens == (own if replica == 0 else own + theirs[4])
        assert (row["loss"], row["tokens"], row["grad_norm"], row.get("replica")) == (loss, tokens, norm, replica)
        assert (f"loss {loss:.4f} (replica 0)" in line) == (replica == 0)
        assert "tokens/s a replica" in line
        assert ("consensus_distance" in row) == (replica is None)
        assert (mine[:4] == theirs[:4]) == (replica is None)
    assert summary.loss == its_summary.loss == one[-1][1]


# -- scales and counts of each replica -----------------------------------------------------------------------------
