"""Weights of a checkpoint in another model and under another plan: parts, renames, tables that have grown, configs."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.training import BATCH, SIZES, batch_of, config_of
from torch import Tensor, nn

import colossus
from colossus.checkpoint import CheckpointError, full_state_dict
from colossus.engine.fit import fit
from colossus.models.gpt import GPT
from colossus.monitor.display import Display

LARGER = dict(vocab_size=SIZES["vocab_size"] + 6, seq_len=SIZES["seq_len"] + 4)
GROW = ("embedding.weight", "positions.weight")


class Wrapped(nn.Module):
    """The model of the config, as a part of another one, beside a new head."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__()
        self.trunk = GPT(**{**SIZES, **sizes})
        self.extra = nn.Linear(3, 2)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.trunk(ids)
        return out

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.trunk.loss(outputs, batch)


def made(plan: dict[str, Any], *, model: Any = None, seed: int = 3, **more: Any) -> Any:
    """An engine in float64."""
    sizes = model if isinstance(model, dict) else {}
    more = {"train": dict(seed=seed), "model": sizes, **plan, **more}
    config = config_of({}, 2, "fp64", **more)
    if callable(model):
        del config["model"]
        return colossus.initialize(config, model=model)
    return colossus.initialize(config)


def step(engine: Any, sizes: dict[str, Any] = SIZES) -> float:
    index, part = engine.context.index("data"), BATCH // engine.context.size("data")
    batch = {key: value[index * part : (index + 1) * part] for key, value in batch_of(0, sizes, BATCH).items()}
    loss: float = engine.train_step(batch).loss
    return loss


def whole(engine: Any) -> dict[str, Tensor]:
    return full_state_dict(engine.model, engine.context)


def saved_by(plan: dict[str, Any], root: str) -> tuple[Path, dict[str, Tensor], float]:
    """A checkpoint after one step, what its weights are, and the loss of the next step."""
    engine = made(plan, checkpoint=dict(dir=root))
    step(engine)
    path = engine.checkpoints.save(background=False).wait().path
    state = whole(engine)
    loss = step(engine)
    engine.close()
    return path, state, loss


def loads(rank: int, save: dict[str, Any], load: dict[str, Any], root: str) -> None:
    path, state, loss = saved_by(save, root)

    # all of it: parameters alone, under another plan
    engine = made(load, seed=9)
    other = whole(engine)
    assert not torch.equal(other["norm.weight"], state["norm.weight"])
    match = engine.checkpoints.load_weights(path)
    assert match.is_complete
    assert_states(whole(engine), state)
    assert engine.completed_steps == 0
    assert not any(engine.optimizer.state.values())
    assert engine.checkpoints.weights_from == path
    assert step(engine) == pytest.approx(loss, rel=1e-10)
    engine.close()

    # errors are the same on all ranks, and nothing is changed
    engine = made(load, seed=9)
    for wrong, said in (
        (dict(only=["block.*"]), r"only: 'block\.\*' matches no parameter of the model"),
        (dict(rename={"blcks": "x"}), r"rename: 'blcks' matches no name of the checkpoint"),
        (dict(rename={"blocks.0": "stack.0"}), r"missing there: blocks\.0\.\S+ .*not in this model"),
    ):
        with pytest.raises(CheckpointError, match=said):
            engine.checkpoints.load_weights(path, **wrong)
    with pytest.raises(CheckpointError, match="there is no such folder"):
        engine.checkpoints.load_weights(Path(root) / "absent")
    assert_states(whole(engine), other)

    # a part, one name of a tied pair, and of a fused parameter
    match = engine.checkpoints.load_weights(path, only=["blocks.1.*", "head.weight", "blocks.0.attention.qkv.key.*"])
    assert len(match.sources) > 3
    for name, value in whole(engine).items():
        is_wanted = name.startswith(("blocks.1.", "head.", "embedding.", "blocks.0.attention.qkv.key."))
        assert torch.equal(value, (state if is_wanted else other)[name]), name
    engine.close()

    # tables with more rows: those that were saved are loaded
    engine = made(load, seed=9, model=LARGER)
    fresh = whole(engine)
    with pytest.raises(CheckpointError, match=r"2 of another shape: embedding\.weight \(53, 24\) there, \(59, 24\)"):
        engine.checkpoints.load_weights(path)
    assert_states(whole(engine), fresh)
    match = engine.checkpoints.load_weights(path, grow=GROW)
    assert dict(match.resized) == {"embedding.weight": (53, 59), "positions.weight": (12, 16)}
    grown = whole(engine)
    for name, value in fresh.items():
        rows = len(state[name])
        assert torch.equal(grown[name][:rows], state[name]), name
        assert torch.equal(grown[name][rows:], value[rows:]), name
    assert grown["head.weight"] is grown["embedding.weight"]
    step(engine, {**SIZES, **LARGER})
    engine.close()


def assert_states(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def test_weights_go_into_another_plan(tmp_path: Path) -> None:
    save = dict(parallel=dict(tensor=dict(mode="2d", size=4)))
    load = dict(parallel=dict(pipeline=2, data=2, zero=3), schedule=dict(microbatches=2))
    run_ranks(4, loads, save, load, str(tmp_path), with_context=False)


def into_another_model(rank: int, root: str) -> None:
    """Under tensor 2: the saved model is a part of another one, and not all of it fits."""
    plan: dict[str, Any] = dict(parallel=dict(tensor=2))
    path, state, _ = saved_by(plan, root)
    engine = made(plan, seed=9, model=Wrapped)
    fresh = whole(engine)
    with pytest.raises(CheckpointError, match=r"nothing in the checkpoint fits "):
        engine.checkpoints.load_weights(path, strict=False)
    match = engine.checkpoints.load_weights(path, rename={"": "trunk"}, strict=False)
    assert match.missing == ["extra.bias", "extra.weight"]
    assert not match.left_over
    found = whole(engine)
    assert_states({name.removeprefix("trunk."): value for name, value in found.items() if "extra" not in name}, state)
    assert torch.equal(found["extra.weight"], fresh["extra.weight"])
    engine.close()

    # what does not fit is told once, by one rank
    engine = made(plan, seed=9, model=LARGER)
    fresh = whole(engine)
    told: list[str] = []
    handler = logging.Handler()
    vars(handler)["emit"] = lambda record: told.append(record.getMessage())
    logging.getLogger("colossus.engine").addHandler(handler)
    match = engine.checkpoints.load_weights(path, rename=lambda name: name.replace("norm", "nrm"), strict=False)
    assert {*match.other_shape} == {"embedding.weight", "positions.weight"}
    assert "norm.weight" in match.missing
    assert "norm.weight" in match.left_over
    found = whole(engine)
    assert torch.equal(found["embedding.weight"], fresh["embedding.weight"])
    assert torch.equal(found["blocks.1.mlp.up.weight"], state["blocks.1.mlp.up.weight"])
    assert len(told) == (1 if rank == 0 else 0)
    assert all("2 of another shape: embedding.weight (53, 24) there, (59, 24) here" in each for each in told)
    engine.close()


def test_weights_go_into_another_model(tmp_path: Path) -> None:
    run_ranks(2, into_another_model, str(tmp_path), with_context=False)


def by_config(rank: int, root: str) -> None:
    """`initialize` takes them, and where the run may go on `fit` does before step 0, unless it does go on."""
    path, state, loss = saved_by(dict(parallel=dict(data=2)), root + "/first")
    batches = [step_batch(rank) for _ in range(4)]

    def fitted(**checkpoint: Any) -> Any:
        engine = made(dict(parallel=dict(data=2)), seed=9, train=dict(seed=9, steps=checkpoint.pop("steps", 1)),
                      checkpoint=dict(dir=root + "/second", **checkpoint))  # fmt: skip
        engine.loaders = type("Loaders", (), {"train": Batches(batches), "validation": None, "description": "",
                                             "validation_missing": ""})()  # fmt: skip
        return engine, fit(engine)

    engine, summary = fitted(weights=dict(path=str(path), only=["blocks.*", "norm.*", "embedding.*", "positions.*"]),
                             every=1, resume="auto")  # fmt: skip
    assert summary.loss == pytest.approx(loss, rel=1e-10)
    assert engine.checkpoints.weights_from == path
    count = len(state) - 1  # of what is tied, one
    assert Display(path, io.StringIO()).heading(engine)[-1] == f"{count} parameters and buffers from {path}"
    after = whole(engine)
    engine.close()

    engine, summary = fitted(weights=str(path), every=1, resume="auto", steps=1)
    assert engine.completed_steps == 1
    assert engine.checkpoints.weights_from is None
    assert_states(whole(engine), after)
    engine.close()

    # in a loop of one's own there is no step of other weights, and a run that has begun keeps what it has
    engine = made(
        dict(parallel=dict(data=2)), seed=9, checkpoint=dict(weights=str(path), dir=str(path.parent), resume="auto")
    )
    engine.checkpoints.resume()
    assert (engine.checkpoints.resumed_from, engine.checkpoints.weights_from) == (path, None)
    engine.close()
    engine = made(dict(parallel=dict(data=2)), seed=9, checkpoint=dict(weights=str(path)))
    assert_states(whole(engine), state)
    assert step(engine) == pytest.approx(loss, rel=1e-10)
    begun = whole(engine)
    assert engine.checkpoints.resume() is None
    assert_states(whole(engine), begun)
    engine.close()
    with pytest.raises(CheckpointError, match=r"^checkpoint\.weights: .*there is no such folder"):
        fitted(weights=root + "/third")
    assert not torch.equal(after["norm.weight"], state["norm.weight"])


class Batches(list[Any]):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state


def step_batch(index: int) -> dict[str, Tensor]:
    part = BATCH // 2
    return {key: value[index * part : (index + 1) * part] for key, value in batch_of(0, SIZES, BATCH).items()}


def test_fit_takes_the_weights_of_the_config(tmp_path: Path) -> None:
    run_ranks(2, by_config, str(tmp_path), with_context=False)
