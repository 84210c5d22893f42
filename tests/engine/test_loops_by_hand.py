"""What a loop of one's own does with an engine's model beside `train_step`: right, or refused in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.long import long
from helpers.plans import plans
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

import colossus
from colossus import layers

PLANS = plans("data2", "zero1", "zero3", "1d", "2d")
X = torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = layers.Linear(8, 8), layers.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def loss_fn(out: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return out.square().sum(), len(out)


def engine_of(parallel: dict[str, Any], model: Any = Net) -> Any:
    config = dict(
        parallel=parallel,
        optimizer=dict(type="SGD", lr=0.1),
        train=dict(global_batch_size=4, precision="fp64"),
        device="cpu",
    )
    return colossus.initialize(config, model=model, loss_fn=loss_fn)


def penalty(engine: Any, loss: Tensor) -> Tensor:
    gradients = torch.autograd.grad(loss, list(engine.model.parameters()), retain_graph=True)
    return torch.stack([gradient.square().sum() for gradient in gradients]).sum()


#: what is done after a backward -> words of its refusal, by plan
ACTS: dict[str, tuple[Callable[[Any, Tensor], Any], dict[str, str]]] = {
    "a step": (lambda engine, loss: engine.optimizer.step(), dict.fromkeys(PLANS, "the optimizer was stepped by hand")),
    "a norm": (
        lambda engine, loss: clip_grad_norm_(engine.model.parameters(), 1.0),
        dict.fromkeys(("1d", "2d"), "was called with the parameter itself, its gradient"),
    ),
    "a vector": (
        lambda engine, loss: parameters_to_vector(engine.model.parameters()),
        dict.fromkeys(("1d", "2d", "zero1", "zero3"), "view was called with the parameter itself"),
    ),
    "a penalty": (
        penalty,
        dict.fromkeys(("1d", "2d"), "sum was called with the parameter itself, its gradient")
        | dict.fromkeys(("zero1", "zero3"), "grad was called with the parameter itself"),
    ),
}


@pytest.mark.parametrize("plan", ["zero1", "1d", *long("data2", "zero3", "2d")])
def test_steps_norms_and_penalties_by_hand(plan: str) -> None:
    """In one process they are plain torch; over several ranks the step at least is refused."""

    def body(rank: int, parallel: dict[str, Any]) -> dict[str, str]:
        engine = engine_of(parallel)
        said = {}
        for name, (act, _) in ACTS.items():
            loss = engine.model(X).square().sum()
            loss.backward(retain_graph=True)
            try:
                said[name] = f"nothing: {act(engine, loss)}"
            except ValueError as error:
                said[name] = str(error)
        engine.train_step(X.chunk(engine.context.size("data"))[engine.context.index("data")])  # goes on
        return said

    (alone,) = run_ranks(1, body, {}, with_context=False)
    assert all(words.startswith("nothing") for words in alone.values())
    world, parallel = PLANS[plan]
    for said in run_ranks(world, body, parallel, with_context=False):
        for name, (_, refused) in ACTS.items():
            assert refused.get(plan, "nothing") in said[name], (name, said[name])


@pytest.mark.parametrize("wrap", [weight_norm, spectral_norm, orthogonal, torch.nn.utils.weight_norm])
def test_parametrizations_go_around_layers_of_torch(wrap: Any) -> None:
    """As the table of user models has them under every plan; around one of ours they are refused."""
    with pytest.raises(ValueError, match=r"while the model is built|after the build"):
        colossus.build(lambda: wrap(layers.Linear(8, 8)))
