"""`colossus.plain`: what a plan trains, in one process and in plain torch: outputs, gradients, names, ties."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.user_models import MODELS
from helpers.user_models.cases import BATCH, Kit, PlainKit
from helpers.user_models.table import LR, PLANS
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.data.batch import slice_batch
from colossus.state.model_state_dict import full_state_dict

#: of the table of user models: each with other layers, or other things that a copy may lose
SOME = ("gated", "two_inputs", "tied_by_hand", "norm_inside_of_a_pair", "transformer_of_pairs", "vision_transformer",
        "weight_norm", "ema_teacher", "generator_in_constructor", "checkpointed_reentrant")  # fmt: skip
#: have hooks on gradients, which a copy of a parameter has not
WITH_GRADIENT_HOOKS = {"GradientHooks", "ClampedGradients"}


def config_of(plan: str, **more: Any) -> dict[str, Any]:
    chosen = PLANS[plan]
    return dict(
        parallel=chosen.parallel,
        schedule=chosen.schedule,
        optimizer=dict(type="SGD", lr=LR),
        train=dict(global_batch_size=BATCH, precision="fp64", seed=3),
        comm=dict(timeout_seconds=120.0),
        device="cpu",
        **more,
    )


def step_on(engine: Any, batch: dict[str, Any]) -> None:
    index, size = engine.context.index("data"), engine.context.size("data")
    part = BATCH // size
    engine.train_step(slice_batch(batch, index * part, (index + 1) * part))


def of_users(rank: int, names: Sequence[str], plan: str) -> list[str]:
    """What is wrong, one line for each model."""
    wrong = []
    for name in names:
        user_model = MODELS[name]
        if user_model.refusal_under(plan) is not None:
            continue
        engine = colossus.initialize(config_of(plan), model=lambda: user_model.make(Kit), loss_fn=user_model.loss)
        step_on(engine, user_model.batch(0))
        only_first = colossus.plain(engine, everywhere=False)
        model = colossus.plain(engine)
        state = full_state_dict(engine.model, engine.context)
        state = {name: value.clone() for name, value in state.items()}
        step_on(engine, user_model.batch(1))  # which leaves the copies alone
        engine.close()
        assert model is not None
        assert (only_first is None) == (rank != 0)
        problem = compare(model, state, user_model.make(PlainKit), user_model.batch(1), user_model.loss)
        for key, value in only_first.state_dict().items() if only_first is not None else ():
            if not torch.equal(value, state[key]):
                problem = f"rank 0 alone is given another {key}"
        if problem:
            wrong.append(f"{name} under {plan}: {problem}")
    return wrong


def compare(model: nn.Module, state: dict[str, Tensor], twin: nn.Module, batch: Any, loss: Any) -> str | None:
    """A plain module with the twin in torch, with the same values."""
    own = model.state_dict()
    if own.keys() != state.keys() or any(not torch.equal(own[name], state[name]) for name in state):
        return f"its state dict has {list(own)}, not {list(state)}"
    ours = [name for name, module in model.named_modules() if type(module) in (layers.Linear, layers.LayerNorm)]
    if ours:
        return f"{ours} are layers of colossus"
    twin.double().load_state_dict(own)
    results = []
    for module in (model, twin):
        module.eval().zero_grad()
        out = module(batch["inputs"])
        total, count = loss(out, batch)
        (total / count).backward()
        results.append((total.detach(), {name: param.grad for name, param in module.named_parameters()}))
    (mine, gradients), (other, wanted) = results
    if not torch.allclose(mine, other, rtol=1e-12, atol=1e-12):
        return f"loss {mine}, of the twin {other}"
    for name, grad in wanted.items():
        if type(model).__name__ in WITH_GRADIENT_HOOKS:
            continue
        if (grad is None) != (gradients[name] is None):
            return f"one of the gradients of {name} is None"
        if grad is not None and not torch.allclose(gradients[name], grad, rtol=1e-10, atol=1e-12):
            return f"gradient of {name} differs by {(gradients[name] - grad).abs().max()}"
    return None


def require(names: Sequence[str], plan: str) -> None:
    for wrong in run_ranks(PLANS[plan].world, of_users, names, plan, with_context=False):
        assert not wrong, "\n".join(wrong)


@pytest.mark.rest("data 2 zero 3", "3d 4 (2,1,2)")
@pytest.mark.parametrize("plan", ["data 2 zero 3", "3d 4 (2,1,2)", "pipeline 2 zb-h1"])
def test_models_of_users(plan: str) -> None:
    require(SOME if "zero" in plan else SOME[::2], plan)


@pytest.mark.long
@pytest.mark.parametrize("plan", PLANS)
def test_all_models_of_users(plan: str) -> None:
    require(tuple(MODELS), plan)
