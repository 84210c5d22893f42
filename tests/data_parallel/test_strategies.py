"""Strategies other than all-reduce, by plain torch: losses, norms, counts, gradients and weights."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.long import but
from helpers.ranks import run_ranks
from helpers.strategies import Delayed, OwnSGD
from helpers.training import (
    SIZES,
    Trace,
    assert_same_numbers,
    assert_same_run,
    batch_of,
    config_of,
    is_key_bias,
    run_plan,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import colossus
from colossus.checkpoint.state_dict import full_state_dict
from colossus.schedule.actions import Action
from colossus.schedule.executor import StepObserver

STEPS, BATCH, CLIP = 5, 12, 0.5
LR, MOMENTUM = 0.05, 0.9
SGD = dict(type="SGD", lr=LR, momentum=MOMENTUM, weight_decay=0.0)
EXACT = dict(loss=1e-10, norm=1e-10, parameter=1e-9)
#: ranks, parallel, schedule, microbatches; the head is tied to the embedding, so a pipeline shares it
PLANS: dict[str, tuple[int, dict[str, Any], str, int]] = {
    "data": (2, dict(data=2), "1f1b", 2),
    "1d": (4, dict(data=2, tensor=dict(size=2, sequence_sharded=True)), "1f1b", 1),
    "1f1b": (4, dict(data=2, pipeline=2), "1f1b", 3),
    "zb-h1": (4, dict(data=2, pipeline=2), "zb-h1", 3),
    "zb-v": (4, dict(data=2, pipeline=2), "zb-v", 2),
}
plans = pytest.mark.parametrize("plan", but(("1f1b", "zb-h1"), PLANS))


def settings_of(parallel: dict[str, Any], kind: str = "1f1b", microbatches: int = 1, **more: Any) -> dict[str, Any]:
    return config_of(
        parallel,
        STEPS,
        "fp64",
        schedule=dict(type=kind, microbatches=microbatches),
        train=dict(global_batch_size=BATCH, clip_grad_norm=CLIP),
        lr_schedule=dict(type="constant", warmup_steps=0),
        optimizer=SGD,
        **more,
    )


def train_with(strategy: dict[str, Any], plan: tuple[int, dict[str, Any], str, int]) -> list[Trace]:
    world, parallel, kind, microbatches = plan
    return run_plan(world, settings_of({**parallel, "strategy": strategy}, kind, microbatches), STEPS)


class Plain:
    """A replica in plain torch: the model that one process starts with, SGD, clipping by its own norm."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=MOMENTUM)

    def backward(self, batch: dict[str, Tensor]) -> tuple[float, int, float]:
        """Clipped gradients of the mean loss; the sum of losses, their number, and the norm before clipping."""
        self.optimizer.zero_grad()
        logits = self.model(batch["inputs"])
        total = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum")
        count = int((batch["labels"] != -100).sum())
        (total / count).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        return total.item(), count, norm.item()


def _start(rank: int) -> nn.Module:
    engine = colossus.initialize(settings_of({}))
    engine.close()
    return engine.model


@cache
def start() -> nn.Module:
    return run_ranks(1, _start, with_context=False)[0]


def weights(model: nn.Module, names: Trace) -> dict[str, Tensor]:
    state = {name: param.detach() for name, param in model.named_parameters()}
    return {name: value for name, value in state.items() if name in names.end}


def assert_weights(trace: Trace, model: nn.Module) -> None:
    compared = 0
    for name, value in weights(model, trace).items():
        if not is_key_bias(name):
            torch.testing.assert_close(trace.end[name], value, rtol=1e-9, atol=1e-11, msg=name)
            compared += 1
    assert compared >= 10


@cache
def counts() -> list[int]:
    """Valid tokens of every step."""
    return [int((batch_of(step, SIZES, BATCH)["labels"] != -100).sum()) for step in range(STEPS)]


# -- gradients of the step before -----------------------------------------------------------------------------


@cache
def delayed() -> tuple[list[float], list[float], Plain]:
    replica = Plain(start())
    losses, norms = [], []
    kept: list[Tensor | None] | None = None
    for step in range(STEPS):
        total, count, norm = replica.backward(batch_of(step, SIZES, BATCH))
        losses.append(total / count)
        norms.append(norm)
        current = [param.grad for param in replica.model.parameters()]
        if kept is not None:
            for param, grad in zip(replica.model.parameters(), kept, strict=True):
                param.grad = grad
            replica.optimizer.step()
        kept = [None if grad is None else grad.clone() for grad in current]
    return losses, norms, replica


@pytest.mark.rest("1d")
@plans
def test_gradients_of_the_step_before(plan: str) -> None:
    losses, norms, replica = delayed()
    for trace in train_with(dict(type=Delayed), PLANS[plan]):
        assert trace.losses == pytest.approx(losses, rel=1e-10)
        assert trace.norms == pytest.approx(norms, rel=1e-10)
        assert trace.tokens == counts()
        assert_weights(trace, replica.model)


# -- exact strategies -----------------------------------------------------------------------------------------


@cache
def alone() -> Trace:
    return run_plan(1, settings_of({}), STEPS)[0]


EXACT_ONES = {"own optimizer": dict(type=OwnSGD, lr=LR, momentum=MOMENTUM), "sharded": dict(type="zero", stage=3)}
#: under more plans in tests/data_parallel/test_zero.py
SHARDED = ("data",)


@pytest.mark.rest("own optimizer-1f1b", "own optimizer-zb-v", "own optimizer-1d")
@pytest.mark.parametrize(
    ("strategy", "plan"),
    [
        *(pytest.param("own optimizer", plan, marks=pytest.mark.long if plan == "1f1b" else ()) for plan in PLANS),
        *(pytest.param("sharded", plan, marks=() if plan in SHARDED else pytest.mark.long) for plan in PLANS),
    ],
)
def test_exact_strategies_are_the_one_process_run(strategy: str, plan: str) -> None:
    for trace in train_with(EXACT_ONES[strategy], PLANS[plan]):
        assert trace.tokens == counts()
        assert_same_run(trace, alone(), **EXACT)
        assert_same_numbers(trace, alone())


def test_rows_over_data_and_sequence() -> None:
    plan = 4, dict(data=2, sequence=2), "1f1b", 1
    for trace in train_with(dict(type="zero", stage=3), plan):
        assert_same_run(trace, alone(), **EXACT)
        assert_same_numbers(trace, alone())


# -- what a store gathers -------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Plain torch: odd sizes, a shared and a frozen parameter, scalars, unused ones, blocks in a ModuleList."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.up, self.down = nn.Linear(width, 5), nn.Linear(5, width, bias=False)
            self.gain = nn.Parameter(torch.tensor(0.7))
            self.fixed = nn.Parameter(torch.randn(3, width), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.gain * self.down(torch.tanh(self.up(self.norm(x)))) + self.fixed.sum(0)

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList([self.Block(7) for _ in range(3)])
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(7, 11)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for number, block in enumerate(self.blocks):
            # recomputed in backward: inside of a block, around one, and around one by reentrant checkpointing
            x = block(x) if number == 0 else checkpoint(block, x, use_reentrant=number == 2)
        return self.head(x)


def _odd_loss(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    labels = batch["labels"]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), torch.tensor(labels.numel())


def _odd_run(rank: int, parallel: dict[str, Any], scope: str) -> tuple[Any, ...]:
    settings = dict(
        parallel={**parallel, "tensor": dict(weights=scope)},
        schedule=dict(microbatches=2),
        optimizer=SGD,
        train=dict(steps=STEPS, global_batch_size=8, precision="fp64", clip_grad_norm=CLIP, seed=5),
    )
    engine = colossus.initialize(settings, model=Odd, loss_fn=_odd_loss)
    storages = {param.untyped_storage().data_ptr(): param.untyped_storage() for param in engine.model.parameters()}
    held = sum(storage.nbytes() for storage in storages.values())
    seen: list[tuple[float, float]] = []
    gathered: list[int] = []

    class Watch(StepObserver):
        def after_action(self, action: Action, began: float, ended: float) -> None:
            blocks = engine.model.blocks
            gathered.append(sum(block.up.weight.shape[0] == 5 for block in blocks))

    engine.observers.append(Watch())
    size, index = engine.context.size("data"), engine.context.index("data")
    for step in range(STEPS):
        ids = torch.randint(0, 11, (8, 6), generator=torch.Generator().manual_seed(step))
        part = ids[index * 8 // size : (index + 1) * 8 // size]
        last = {"inputs": part[:, :-1], "labels": part[:, 1:]}
        result = engine.train_step(last)
        seen.append((result.loss, result.grad_norm))
    evaluated = engine.eval_step(last).loss
    gradients = full_state_dict(engine.model, engine.context, gradients=True)
    state = full_state_dict(engine.model, engine.context)
    engine.close()
    return seen, evaluated, gradients, state, held, gathered


@pytest.mark.rest("3-microbatch")
@pytest.mark.parametrize(
    ("stage", "scope"), [(1, "matmul"), (2, "step"), (3, "matmul"), (3, "microbatch"), (3, "step")]
)
def test_plain_modules_are_gathered_by_block(stage: int, scope: str) -> None:
    (seen, evaluated, gradients, state, held, _) = odd_alone()
    traces = run_ranks(2, _odd_run, dict(data=2, zero=stage), scope, with_context=False)
    for mine, my_evaluation, my_gradients, my_state, my_bytes, gathered in traces:
        assert mine == [pytest.approx(pair, rel=1e-10) for pair in seen]
        assert my_evaluation == pytest.approx(evaluated, rel=1e-9)
        assert list(my_gradients) == list(gradients)
        assert "unused.weight" not in gradients
        assert list(my_state) == list(state)
        for name, value in gradients.items():
            torch.testing.assert_close(my_gradients[name], value, rtol=1e-9, atol=1e-12, msg=name)
        for name, value in state.items():
            torch.testing.assert_close(my_state[name], value, rtol=1e-9, atol=1e-12, msg=name)
        # blocks that are whole between actions: none, those that autograd waits to run backward of (reentrant
        # checkpointing runs its block without autograd), or all
        if stage == 3:
            assert my_bytes < 0.6 * held
            assert set(gathered) == {"matmul": {0}, "microbatch": {0, 2}, "step": {3}}[scope]
        else:
            assert set(gathered) == {3}


@cache
def odd_alone() -> tuple[Any, ...]:
    return run_ranks(1, _odd_run, {}, "matmul", with_context=False)[0]
