"""Checkpoints of replicas with state of their own: what is under which keys, and who goes on with what."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.long import but
from helpers.ranks import run_ranks
from helpers.resumed import CLASSES, WIDTH, Listener, Vectors, settings, uneven
from helpers.strategies import Apart
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.checkpoint.folder import name_of as folder_name_of
from colossus.checkpoint.reader import CheckpointReader


class Mixed(nn.Module):
    """With running statistics, a layer that is frozen and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = layers.Linear(WIDTH, 7, split="column"), layers.Linear(7, CLASSES, split="row")
        self.norm, self.frozen, self.unused = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(2, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.frozen(self.norm(x))).tanh())


STRATEGIES: dict[str, dict[str, Any]] = {
    "sgp": dict(type="sgp", overlap=2),
    "d-psgd": dict(type="d-psgd", graph="ring"),
    "local_sgd": dict(type="local_sgd", period=2),
    "diloco": dict(type="diloco", period=2),
    "slowmo": dict(type="slowmo", period=2),
    "own": dict(type=Apart, travelling=0.5),
}


def config_of(folder: Path, strategy: Any, data: int = 3, **more: Any) -> dict[str, Any]:
    plan = dict(data=data) if strategy is None else dict(data=data, strategy=strategy)
    return settings(folder, plan, train=dict(steps=9, global_batch_size=12, clip_grad_norm=0.5), **more)


def mixed(config: dict[str, Any]) -> Any:
    return colossus.initialize(config, model=Mixed, loss_fn=uneven, data=Vectors())


State = dict[str, Any]


def state_of(engine: Any) -> State:
    """All that a replica goes on with."""
    names = {param: name for name, param in engine.model.named_parameters()}
    kept = {
        f"{section}.{names[param]}.{entry}": value
        for section, of_params in (
            ("optimizer", engine.optimizer.state),
            ("strategy", engine.strategy.parameter_state()),
        )
        for param, of_param in of_params.items()
        for entry, value in of_param.items()
    }
    state = {**engine.model.state_dict(), **kept}
    copies = {name: torch.as_tensor(value).detach().clone() for name, value in state.items()}
    return copies | {"": engine.strategy.state_dict()}


def differences(one: State, other: State) -> list[str]:
    """Names of what is not the same to the bit."""
    assert one[""] == other[""]
    return [
        *(one.keys() ^ other.keys()),
        *(name for name in one.keys() & other.keys() if name and not torch.equal(one[name], other[name])),
    ]


def trains(engine: Any, steps: int) -> list[float]:
    return [engine.train_step(next(engine.loader)).loss for _ in range(steps)]


def goes_on(rank: int, folder: Path, name: str) -> tuple[State, list[Tensor], float]:
    """Trains, saves and trains on; another engine goes on behind the save, and so does the same."""
    config = config_of(folder / name, STRATEGIES[name])
    engine = mixed(config)
    trains(engine, 3)
    shares, weight = engine.strategy.average_addend()
    shares = [share.clone() for share in shares]
    at_save = state_of(engine)
    path = engine.checkpoints.save(background=True).wait().path
    assert not differences(state_of(engine), at_save), "a save changes nothing"
    losses = trains(engine, 2)
    at_end = state_of(engine)
    engine.checkpoints.load(path)
    assert not differences(state_of(engine), at_save)
    assert trains(engine, 2) == losses
    assert not differences(state_of(engine), at_end)
    engine.close()
    other = mixed(config)
    other.checkpoints.load(path)
    assert not differences(state_of(other), at_save)
    assert trains(other, 2) == losses
    assert not differences(state_of(other), at_end)
    other.close()
    return at_save, shares, weight


def comes_back(rank: int, config: dict[str, Any]) -> None:
    engine = mixed(config)
    trains(engine, 3)
    save = engine.checkpoints.save()  # nothing is under way then
    at_save = state_of(engine)
    trains(engine, 2)
    engine.checkpoints.load(save.wait().path)
    assert not differences(state_of(engine), at_save)
    trains(engine, 1)
    engine.close()


def test_an_asynchronous_state_comes_back_to_the_bit(tmp_path: Path) -> None:
    run_ranks(2, comes_back, config_of(tmp_path, dict(type="ad-psgd", graph="ring"), 2), with_context=False)


def looks_at(rank: int, path: Path, config: dict[str, Any]) -> tuple[State, list[str]]:
    listener = Listener()
    logging.getLogger("colossus").addHandler(listener)
    engine = mixed(config)
    listener.told.clear()
    engine.checkpoints.load(path)
    state = state_of(engine)
    trains(engine, 1)
    engine.close()
    return state, listener.told


AFFINE = ("norm.weight", "norm.bias")


@pytest.mark.parametrize("name", but(("d-psgd", "local_sgd", "diloco", "slowmo", "own"), STRATEGIES))
def test_each_goes_on_with_its_own_to_the_bit_and_others_with_the_average(name: str, tmp_path: Path) -> None:
    ranks = run_ranks(3, goes_on, tmp_path, name, with_context=False)
    states, path = [state for state, _, _ in ranks], tmp_path / name / folder_name_of(3)
    total = sum(weight for _, _, weight in ranks)
    assert total == pytest.approx(4.5 if name == "own" else 3.0, rel=1e-14), "mass in flight included"
    means = [sum(shares) / total for shares in zip(*(shares for _, shares, _ in ranks), strict=True)]
    trained = [key for key in states[0] if key.partition(".")[0] in ("up", "down", "unused") or key in AFFINE]
    with CheckpointReader(path) as reader:
        for key, mean in zip(trained, means, strict=True):
            torch.testing.assert_close(reader.tensor(f"model/{key}"), mean, rtol=0, atol=1e-14)
            for index, state in enumerate(states):
                assert torch.equal(reader.tensor(f"replicas/{index}/model/{key}"), state[key])
        for key in ("norm.running_mean", "norm.running_var"):
            mean = sum(state[key] for state in states) / 3
            torch.testing.assert_close(reader.tensor(f"model/{key}"), mean, rtol=0, atol=1e-14)
            assert not torch.equal(states[0][key], states[1][key])
        keys = [*reader.manifest.tensors]
        assert not any("frozen" in key for key in keys if key.startswith("replicas/"))
        average = {key: reader.tensor(key) for key in keys if key.startswith("model/")}
    same, other = STRATEGIES[name], STRATEGIES["diloco" if name == "sgp" else "sgp"]
    for number, strategy in ((2, same), (4, same), (3, other), (3, None)):
        config = config_of(tmp_path / "other", strategy, number)
        for rank, (state, told) in enumerate(run_ranks(number, looks_at, path, config, with_context=False)):
            for key in average:
                assert torch.equal(state[key.removeprefix("model/")], average[key]), key
            is_alike = strategy is same and name in ("diloco", "slowmo")
            kept = {key for key in states[0] if key.startswith(("optimizer.", "strategy.")[: 1 + is_alike])}
            assert not is_alike or any(key.endswith(".momentum") for key in kept)
            for key in kept:
                assert torch.equal(state[key], states[0][key]), key
            assert any(key.startswith("strategy.") for key in state) == is_alike
            assert not is_alike or state[""] == states[0][""]
            what = f"the optimizer of the first; the state of the strategy is {'' if is_alike else 'not '}taken"
            assert (what in "".join(told)) == (rank == 0)
