"""A model, and that of an engine, copied by `copy.deepcopy` and `pickle`."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.checkpoint.state_dict import full_state_dict
from colossus.layout.parameter import spec_of

WIDTH = 8


class Net(nn.Module):
    """Of each kind of layer one; a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = layers.Embedding(11, WIDTH)
        self.attention = layers.Attention(WIDTH, 4, 2, rotary=True)
        self.norm, self.mlp = layers.LayerNorm(WIDTH), layers.GatedMLP(WIDTH, 16)
        self.plain, self.drop = nn.Linear(WIDTH, WIDTH), layers.Dropout(0.2)
        self.head = layers.LMHead(WIDTH, 11, tied_to=self.embedding)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.plain(self.embedding(ids)))
        return self.head(self.norm(self.mlp(self.attention(x))))

    def pipeline_blocks(self) -> list[layers.PipelineBlock]:
        return [
            layers.PipelineBlock(lambda ids: self.plain(self.embedding(ids)), self.embedding, self.plain, self.drop),
            layers.PipelineBlock(lambda x: self.mlp(self.attention(x)), self.mlp, self.attention),
            layers.PipelineBlock(lambda x: self.head(self.norm(x)), self.norm, self.head),
        ]


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


def _engine(parallel: dict[str, Any]) -> Any:
    def loss(outputs: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return layers.cross_entropy(outputs, ids)

    config = dict(
        parallel=parallel,
        train=dict(global_batch_size=4, precision="fp64", seed=4),
        schedule=dict(type="gpipe", microbatches=2),
        device="cpu",
    )
    return colossus.initialize(config, model=Net, loss_fn=loss)


def _copied(rank: int, parallel: dict[str, Any]) -> bytes:
    engine, ids = _engine(parallel), torch.arange(32).view(4, 8) % 11
    engine.train_step(ids)
    model, context = engine.model, engine.context
    whole = full_state_dict(model, context)
    for title, make in COPIES.items():
        made = make(model.train())
        assert isinstance(made, Net)
        assert made.training
        names = [name for name, _ in model.named_parameters()]
        assert [name for name, _ in made.named_parameters()] == names, "what is tied stays tied"
        held = zip(made.parameters(), model.parameters(), strict=True)
        assert all((spec_of(mine) is None) == (spec_of(other) is None) and mine is not other for mine, other in held)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.mul_(2)
        for name, value in full_state_dict(made, context).items():
            assert torch.equal(value, 2 * whole[name]), (title, name)
        if context.size("pipeline") == 1:
            own = engine.inputs.local(ids)
            model.load_state_dict(made.state_dict())
            for each in (made, model):
                each.zero_grad()
                each.eval()  # a second call would draw another mask
                layers.cross_entropy(each(own), own)[0].backward()
            for (name, mine), other in zip(made.named_parameters(), model.parameters(), strict=True):
                assert torch.equal(mine.grad, other.grad), (title, name)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.div_(2)
    assert engine.train_step(ids).loss > 0
    data = pickle.dumps(engine.model)
    engine.close()
    return data


@pytest.mark.parametrize("parallel", [dict(tensor=2), dict(pipeline=2)], ids=str)
def test_a_copy_is_the_same_model_of_its_own(parallel: dict[str, Any]) -> None:
    run_ranks(2, _copied, parallel, with_context=False)
