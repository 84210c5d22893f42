"""Synchronous steps at parameter servers: all-reduce to the last digits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import server_threads
from helpers.long import long
from helpers.ranks import run_ranks
from helpers.training import Trace, assert_close_states, config_of, is_key_bias, run_cases
from torch import Tensor, nn

import colossus

server_threads.in_threads()

STEPS = 3
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": dict(type="SGD", lr=0.1, weight_decay=0.01),
    "momentum": dict(type="SGD", lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "nesterov": dict(type="SGD", lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": dict(type="Adagrad", lr=0.1, lr_decay=0.01, weight_decay=0.01),
    "adamw": dict(type="AdamW", lr=1e-2, weight_decay=0.1),
    "adam": dict(type="Adam", lr=1e-2, weight_decay=0.1),
}
SERVER: dict[str, Any] = dict(type="server", servers=3)


def pair(plan: dict[str, Any], optimizer: str, **more: Any) -> dict[str, dict[str, Any]]:
    """The same run by all-reduce and by servers."""
    train = {"steps": STEPS, **more.pop("train", {})}
    runs = {"all_reduce": dict(type="all_reduce"), "server": SERVER}
    return {
        name: config_of(
            {**plan, "strategy": strategy},
            STEPS,
            "fp64",
            optimizer=OPTIMIZERS[optimizer],
            train=train,
            lr_schedule=dict(warmup_steps=2),
            **more,
        )
        for name, strategy in runs.items()
    }


def assert_all_equal(world: int, cases: dict[str, dict[str, dict[str, Any]]]) -> None:
    configs = {f"{case}/{name}": config for case, runs in cases.items() for name, config in runs.items()}
    found = run_cases(world, configs, STEPS)
    for case in cases:
        for mine, wanted in zip(found[f"{case}/server"], found[f"{case}/all_reduce"], strict=True):
            assert_same(mine, wanted, case)


def assert_same(mine: Trace, wanted: Trace, case: str) -> None:
    assert mine.tokens == wanted.tokens
    for what in ("losses", "norms"):
        torch.testing.assert_close(getattr(mine, what), getattr(wanted, what), rtol=1e-11, atol=1e-12, msg=case)
    assert mine.end.keys() == wanted.end.keys()
    ends = [{name: x for name, x in trace.end.items() if not is_key_bias(name)} for trace in (mine, wanted)]
    assert_close_states(ends[0], ends[1], f"{case}: weight", atol=1e-11)
    assert any(not torch.equal(mine.end[name], mine.start[name]) for name in mine.end)


def case_of(name: str) -> dict[str, dict[str, Any]]:
    """Of an optimizer with a norm that clips, or of what is named."""
    if name == "microbatches":
        return pair(dict(data=2), "adamw", schedule=dict(microbatches=2))
    if name == "clipped values":
        return pair(dict(data=2), "momentum", train=dict(clip_grad_norm=0.7, clip_grad_value=1e-3))
    return pair(dict(data=2), name, train=dict(clip_grad_norm=0.7))


@pytest.mark.parametrize(
    "names",
    [
        ("adagrad", "microbatches", "clipped values"),
        *long(("sgd", "momentum", "nesterov", "adamw", "adam")),
    ],
    ids=["some", "rest"],
)
def test_each_optimizer_is_that_of_all_reduce(names: tuple[str, ...]) -> None:
    """With unequal tokens."""
    assert_all_equal(2, {name: case_of(name) for name in names})


PRODUCTS: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "1d": (4, pair(dict(data=2, tensor=dict(mode="1d", size=2, sequence_sharded=False)), "adamw")),
    "1d, tokens split": (4, pair(dict(data=2, tensor=dict(mode="1d", size=2, sequence_sharded=True)), "momentum")),
    "sequence": (4, pair(dict(data=2, sequence=2), "momentum")),
    "2d": (8, pair(dict(data=2, tensor=dict(mode="2d", size=4)), "adamw")),
    "pipeline, tied": (
        4,
        pair(dict(data=2, pipeline=2), "adamw", schedule=dict(microbatches=2), model=dict(tie_embeddings=True)),
    ),
}


@pytest.mark.parametrize("name", ["1d", *long("1d, tokens split", "sequence", "2d", "pipeline, tied")])
def test_products(name: str) -> None:
    world, runs = PRODUCTS[name]
    assert_all_equal(world, {name: runs})


class Net(nn.Module):
    """With a frozen parameter, one that nothing uses, and one without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(5, 3), nn.Parameter(torch.tensor(1.5))
        self.unused, self.frozen = nn.Linear(3, 2), nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale + self.frozen


def loss_fn(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return nn.functional.cross_entropy(outputs, batch["labels"], reduction="sum"), len(outputs)


def _edges(rank: int, damaged: tuple[int, int] | None, precision: str) -> dict[str, tuple[list[bool], Tensor]]:
    """Of both strategies which steps were skipped, and all parameters."""
    found = {}
    for name, strategy in {"all_reduce": dict(type="all_reduce"), "server": dict(type="server", servers=2)}.items():
        engine = colossus.initialize(
            dict(
                parallel=dict(data=2, strategy=strategy),
                train=dict(steps=STEPS, global_batch_size=8, precision=precision, on_nonfinite="skip", seed=1),
                optimizer=dict(type="AdamW", lr=0.1, weight_decay=0.1),
                device="cpu",
            ),
            model=Net,
            loss_fn=loss_fn,
        )
        skipped = []
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(10 * step + rank)
            inputs = torch.randn(4, 5, generator=generator)
            if damaged == (step, rank):
                inputs[0, 0] = torch.nan
            inputs = inputs.double() if precision == "fp64" else inputs
            labels = torch.randint(0, 3, (4,), generator=generator)
            skipped.append(bool(engine.train_step({"inputs": inputs, "labels": labels}).skipped))
        params = [param.detach().double().flatten() for param in engine.model.parameters()]
        found[name] = skipped, torch.cat(params)
        engine.close()
    return found


@pytest.mark.parametrize("precision", ["fp64", *long("fp32", "fp16", "bf16")])
def test_a_step_that_is_skipped_and_parameters_without_gradients(precision: str) -> None:
    for found in run_ranks(2, _edges, (1, 1), precision, with_context=False):
        (skipped, mine), (wanted_skipped, wanted) = found["server"], found["all_reduce"]
        assert skipped == wanted_skipped
        assert skipped[1] is True
        torch.testing.assert_close(mine, wanted, rtol=0.0, atol=1e-12 if precision == "fp64" else 1e-6)
