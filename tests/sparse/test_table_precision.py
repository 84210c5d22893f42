"""Tables with sparse gradients in low precision: stored as wide as the optimizer's state, scaled and skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.long import but
from helpers.ranks import grid, run_ranks
from helpers.tables import SAMPLES, TABLES, Run, Words, batch_of, loss_fn, own_part, train

import colossus
from colossus import layers
from colossus.context.parallel_context import ParallelContext
from colossus.gradients.gradient_norm import GradientNorm
from colossus.rows.row_gradient import RowGradient
from colossus.state.model_state_dict import full_state_dict

PRECISIONS: dict[str, Any] = {"bf16": "bf16", "fp16": "fp16", "bf16 parameters": dict(params="bf16", compute="bf16")}
#: of losses, and of weights by the norm of their difference
BOUNDS = {"bf16": (2**-9, 2**-5), "fp16": (2**-12, 2**-8), "bf16 parameters": (2**-8, 2**-5)}


def config_of(precision: Any, data: int, way: str = "dense", **train: Any) -> dict[str, Any]:
    strategy = dict(type="hybrid", ways={"0.small.*": "dense", "*": way}) if data > 1 else dict(type="all_reduce")
    return dict(
        parallel=dict(data=data, strategy=strategy),
        optimizer=dict(type="SGD", lr=0.5, momentum=0.5),
        train=dict(steps=4, global_batch_size=SAMPLES, precision=precision, clip_grad_norm=1.0, seed=5, **train),
        device="cpu",
    )


@pytest.mark.parametrize("name", but(["bf16", "fp16"], PRECISIONS))
def test_ways_are_one_process_of_the_same_precision(name: str) -> None:
    precision = PRECISIONS[name]

    def body(rank: int) -> dict[str, Run]:
        return {way: train(config_of(precision, 2, way)) for way in ("dense", "gather", "owners")}

    runs = run_ranks(2, body, with_context=False)[0]
    alone = run_ranks(1, lambda rank: train(config_of(precision, 1)), with_context=False)[0]
    exact = run_ranks(1, lambda rank: train(config_of("fp32", 1)), with_context=False)[0]
    loss, weight = BOUNDS[name]
    for way, run in runs.items():
        assert run.losses == pytest.approx(alone.losses, rel=loss), way
        for table in TABLES:
            value, other, start = run.weights[-1][table], alone.weights[-1][table], alone.weights[0][table]
            assert value.dtype == torch.float32
            moved = (other - start).norm()
            assert (value - other).norm() <= weight * moved, (way, table)
            assert (value - exact.weights[-1][table]).norm() <= 8 * weight * moved, (way, table)


def test_small_updates_of_a_table_are_not_rounded_away() -> None:
    """Less than a bfloat16 can tell: parameters of bfloat16 have a wide copy behind them, a table is wide itself."""

    def body(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config = config_of(PRECISIONS["bf16 parameters"], 2, "owners")
        config["optimizer"] = dict(type="SGD", lr=1e-2)
        engine = colossus.initialize(config, model=Words, loss_fn=loss_fn)
        states = [full_state_dict(engine.model, engine.context)["0.words.weight"]]
        engine.train_step(own_part(batch_of(0), engine))
        gradient = full_state_dict(engine.model, engine.context, gradients=True)["0.words.weight"]
        states.append(full_state_dict(engine.model, engine.context)["0.words.weight"])
        engine.close()
        return states[0], states[1], gradient

    start, end, gradient = run_ranks(2, body, with_context=False)[0]
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(end, start - 1e-2 * gradient, rtol=1e-6, atol=1e-8)
    assert (end != start).any(1).sum() == gradient.any(1).sum() > 5


def test_the_norm_of_many_rows_does_not_depend_on_their_order() -> None:
    """Of 32 bits, whose plain sum is off by 1e-5: plans have rows in orders of their own."""
    context = ParallelContext(grid())
    table: Any = colossus.build(lambda: layers.Embedding(5000, 256, sparse=True), context)
    rows = torch.randn(5000, 256, generator=torch.Generator().manual_seed(0))
    table.weight.grad = RowGradient(torch.arange(5000), rows).as_sparse(5000)
    (square,) = GradientNorm([table.weight], context).local_squares(torch.device("cpu")).tolist()
    assert square == pytest.approx(rows.double().square().sum().item(), rel=1e-8)
