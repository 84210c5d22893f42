"""Checkpoints of replicas with state of their own: what is under which keys, and who goes on with what."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from helpers.resumed import load, saved, settings
from torch import Tensor, nn

from colossus.engine.strategies.all_reduce import AllReduce

# -- an exact strategy that keeps something of its own in each replica -------------------------------------------


class Residuals(AllReduce):
    """Keeps a tensor for each parameter and a number, other ones in each replica."""

    state_per_replica = True
    kept: Mapping[nn.Parameter, Mapping[str, Any]] | None = None
    number = -1

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number} if self.number >= 0 else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.number = state.get("number", -1)

    def after_step(self, step: int) -> None:
        self.number = index = self.parts.context.index("data")
        self.kept = {param: {"residual": param.detach() + index} for param in self.trained}

    def parameter_state(self) -> Mapping[nn.Parameter, Mapping[str, Any]]:
        return self.kept or {}

    def load_parameter_state(self, state: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        self.kept = dict(state)


def residuals(engine: Any) -> tuple[int, list[Tensor]]:
    kept = engine.strategy.kept
    return engine.strategy.number, [(kept[param]["residual"] - param.detach()) for param in kept]


def test_an_exact_strategy_with_state_of_each_replica(tmp_path: Path) -> None:
    parallel = dict(data=2, strategy=dict(type=Residuals))
    path = saved(tmp_path, world=2, parallel=parallel)
    for world, plan in ((2, parallel), (4, {**parallel, "tensor": 2})):
        for rank, ((number, gaps), told, _) in enumerate(load(path, settings(tmp_path / "a", plan), residuals, world)):
            index = rank * 2 // world
            assert (number, told) == (index, [])
            assert gaps
            for gap in gaps:
                torch.testing.assert_close(gap, torch.full_like(gap, index), rtol=0, atol=1e-12)
    ((found, told, _),) = load(path, settings(tmp_path / "one", dict(strategy=dict(type=Residuals))), residuals)
    assert found == (-1, [])
    assert told == ["what the strategy of the checkpoint has kept is not taken: it is of 2 replicas, now there is 1"]
    ((_, told, _),) = load(path, settings(tmp_path / "other"))
    assert told == [
        "what the strategy of the checkpoint has kept is not taken: it is of Residuals, this run has AllReduce"
    ]
