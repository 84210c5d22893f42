"""Deep copies and pickles of an engine's model: as of torch's modules, or refused in words."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from torch import Tensor, nn

import colossus
from colossus import layers


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.down = layers.Embedding(12, 8), layers.Linear(8, 6), nn.Linear(6, 8)
        self.norm, self.dropout = nn.LayerNorm(8), layers.Dropout(0.0)

    def forward(self, ids: Tensor) -> Tensor:
        return self.dropout(self.norm(self.down(torch.tanh(self.up(self.words(ids))))))


def _saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": _saved,
}


def _copied(rank: int, parallel: dict[str, Any]) -> dict[str, Tensor | str]:
    engine = colossus.initialize(
        dict(
            parallel=parallel,
            optimizer=dict(type="SGD", lr=0.1),
            train=dict(global_batch_size=4, precision="fp64"),
            device="cpu",
        ),
        model=Net,
        loss_fn=lambda outputs, batch: (outputs.square().sum(), len(batch)),
    )
    ids = torch.arange(8).view(4, 2).chunk(engine.context.size("data"))[engine.context.index("data")]
    engine.train_step(ids)
    engine.model.eval()
    with torch.no_grad():
        outputs = engine.model(ids)
        found: dict[str, Tensor | str] = {}
        for name, copied in COPIES.items():
            try:
                found[name] = copied(engine.model)(ids) - outputs
            except ValueError as error:
                found[name] = str(error)
    engine.close()
    return found


def _plan(**parallel: Any) -> Any:
    return pytest.param(parallel, id=str(parallel), marks=pytest.mark.long)


@pytest.mark.parametrize("parallel", [dict(tensor=2), _plan(), _plan(data=2), _plan(tensor=dict(mode="2d", size=4))])
def test_a_copy_computes_the_same(parallel: dict[str, Any]) -> None:
    world = 4 if isinstance(parallel.get("tensor"), dict) else 2 if parallel else 1
    for found in run_ranks(world, _copied, parallel, with_context=False):
        assert found.keys() == COPIES.keys()
        for name, difference in found.items():
            assert isinstance(difference, Tensor), (name, difference)
            assert not difference.any(), name


@pytest.mark.parametrize("parallel", [dict(data=2, zero=3), _plan(data=2, zero=1)])
def test_a_copy_whose_parameters_are_rows_is_refused(parallel: dict[str, Any]) -> None:
    for found in run_ranks(2, _copied, parallel, with_context=False):
        assert "cannot be called: this rank has only some rows of its parameters" in str(found["deepcopy"])
        for name in ("pickle", "torch.save"):
            assert "cannot be pickled: this rank has only some rows of its parameters" in str(found[name]), found[name]
