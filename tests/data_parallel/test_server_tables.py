"""Tables with sparse gradients at parameter servers: rows travel, and the results are those of all-reduce."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import server_threads
from helpers.long import long
from helpers.ranks import run_ranks
from helpers.two_tables import CLASSES, DIM, Words, batch_of, loss_fn

import colossus

server_threads.in_threads()

SAMPLES, STEPS = 8, 4
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": dict(type="SGD", lr=0.5),
    "momentum": dict(type="SGD", lr=0.2, momentum=0.9),
    "adagrad": dict(type="Adagrad", lr=0.1),
    "adamw": dict(type="AdamW", lr=0.01, weight_decay=0.1),
    "tables of their own": dict(type="AdamW", lr=0.01, tables=dict(type="RowWiseAdagrad", lr=0.1)),
}


def _train(
    rank: int, parallel: dict[str, Any], optimizers: tuple[str, ...], strategies: dict[str, Any]
) -> dict[str, Any]:
    """Of each run losses and norms, the parameters in the end, and bytes pulled and pushed by each step."""
    found = {}
    for name in optimizers:
        for kind, strategy in strategies.items():
            engine = colossus.initialize(
                dict(
                    parallel={**parallel, "strategy": strategy},
                    optimizer=OPTIMIZERS[name],
                    schedule=dict(microbatches=2),
                    train=dict(steps=STEPS, global_batch_size=SAMPLES, precision="fp64", clip_grad_norm=0.3),
                ),
                model=Words,
                loss_fn=loss_fn,
            )
            context = engine.context
            numbers, sizes = [], []
            for step in range(STEPS):
                result = engine.train_step(batch_of(step, SAMPLES, context.index("data"), context.size("data")))
                numbers += [result.loss, result.grad_norm]
                sizes.append({key: value for key, value in engine.strategy.report().items() if key.endswith("_bytes")})
            with engine.strategy.export():
                params = {each: param.detach().clone() for each, param in engine.model.named_parameters()}
            found[f"{name}/{kind}"] = torch.tensor(numbers, dtype=torch.float64), params, sizes
            engine.close()
    return found


def _assert_same(found: dict[str, Any], optimizers: tuple[str, ...]) -> None:
    for name in optimizers:
        (numbers, params, _), (wanted_numbers, wanted, _) = found[f"{name}/server"], found[f"{name}/all_reduce"]
        torch.testing.assert_close(numbers, wanted_numbers, rtol=1e-11, atol=1e-12, msg=name)
        for each, value in wanted.items():
            torch.testing.assert_close(params[each], value, rtol=0, atol=1e-11, msg=f"{each}, {name}")


@pytest.mark.parametrize(
    "names", [("sgd", "tables of their own"), *long(("momentum", "adagrad", "adamw", "sgd"))], ids=["some", "rest"]
)
def test_a_table_at_servers_is_that_of_all_reduce(names: tuple[str, ...]) -> None:
    strategies = {"all_reduce": dict(type="all_reduce"), "server": dict(type="server", servers=3)}
    for rank, found in enumerate(run_ranks(2, _train, dict(data=2), names, strategies, with_context=False)):
        _assert_same(found, names)
        # rows are pulled once in a step, although two microbatches look them up
        dense = (DIM * CLASSES + CLASSES) * 8
        for step, sizes in enumerate(found["sgd/server"][2][:-1]):  # the last is a sync point
            ids = batch_of(step, SAMPLES, rank, 2)[0]
            pulled = len(ids.unique()) + len((ids // 2).unique())
            pushed = len(ids[ids != 2].unique()) + len((ids // 2).unique())
            assert sizes["pull_bytes"] == dense + pulled * DIM * 8
            assert sizes["push_bytes"] == dense + pushed * (DIM + 1) * 8  # with their ids


@pytest.mark.long
def test_tables_of_one_asynchronous_worker_and_of_tensor_ranks() -> None:
    names = ("sgd", "adagrad")
    strategies = {"all_reduce": dict(type="all_reduce"), "server": dict(type="server", mode="async", servers=2)}
    for found in run_ranks(2, _train, dict(tensor=2), names, strategies, with_context=False):
        _assert_same(found, names)
