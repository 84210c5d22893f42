"""Gradients that are not finite: every rank raises or skips, all know where it began, and training goes on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.faulty_gradients import Faulty, Messages, Place
from helpers.long import but
from helpers.ranks import run_ranks
from helpers.strategies import LocalSteps
from helpers.training import config_of
from torch import Tensor, nn

import colossus
from colossus.data_parallel.update import _skipped_where, skipping_on_device
from colossus.engine.nonfinite import NonFiniteGradients
from colossus.engine.optimizers import torch_optimizer

STEPS, BAD = 4, 1


def settings(parallel: dict[str, Any], kind: str = "1f1b", **train: Any) -> dict[str, Any]:
    microbatches = 2 if parallel.get("pipeline", 1) > 1 else 1
    train = {"on_nonfinite": "skip", **train}
    schedule, rate = dict(type=kind, microbatches=microbatches), dict(type="cosine", warmup_steps=2)
    return config_of(parallel, STEPS, "fp64", schedule=schedule, train=train, lr_schedule=rate)


def _same(mine: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert mine.keys() == other.keys()
    for name, value in other.items():
        assert torch.equal(mine[name], value), name


def _skip_and_raise(rank: int, parallel: dict[str, Any], kind: str, places: list[Place]) -> Any:
    """One step has bad gradients: skipped, it is as if it had never updated anything; then the same, raised."""
    config = settings(parallel, kind)
    with Messages() as messages:
        faulty = Faulty(config)
        results = [faulty.step(step, places if step == BAD else ()) for step in range(STEPS)]
    assert [result.skipped for result in results] == [step == BAD for step in range(STEPS)]
    assert [result.num_skipped for result in results] == [0, 1, 1, 1]
    assert all(result.grad_norm < 1e6 for step, result in enumerate(results) if step != BAD)
    skipped = faulty.state()
    faulty.engine.close()

    plain = Faulty(settings(parallel, kind))
    for step in range(STEPS):
        undo = plain.leave_out_update() if step == BAD else lambda: None
        result = plain.step(step)
        undo()
        # what was lost is the update: data, schedule and random numbers went on
        assert (result.lr, result.loss) == (results[step].lr, results[step].loss)
    _same(skipped, plain.state())
    plain.engine.close()

    config["train"]["on_nonfinite"] = "raise"
    faulty = Faulty(config)
    faulty.step(0)
    before = faulty.state()
    with pytest.raises(NonFiniteGradients) as raised:
        faulty.step(BAD, places)
    assert raised.value.step == BAD + 1
    _same(faulty.state(), before)
    faulty.step(2)  # a loop that caught it goes on
    assert faulty.engine.completed_steps == 2
    faulty.engine.close()
    return messages.lines, str(raised.value)


UP = "blocks.0.mlp.up.weight"
#: ranks, parallel, schedule, places of bad gradients; what is named, the last in the model's order first
CASES: dict[str, tuple[int, dict[str, Any], str, list[Place], str]] = {
    "1f1b": (
        4,
        dict(data=2, pipeline=2),
        "1f1b",
        [(3, "blocks.1.mlp.up.weight"), (0, UP)],
        f"blocks.1.mlp.up.weight, {UP}",
    ),
    "zb-h1": (4, dict(data=2, pipeline=2), "zb-h1", [(1, UP), (1, "positions.weight")], f"{UP}, positions.weight"),
    # the head's part of the embedding's gradient: rank 3 has it, and ranks 0, 1 and 2 get it by the sums
    "tied": (4, dict(data=2, pipeline=2), "1f1b", [(3, "embedding.weight")], "embedding.weight"),
    "1d": (4, dict(data=2, tensor=dict(size=2)), "1f1b", [(2, UP)], UP),
    # whole on every rank, the same gradient without a sum: the norm counts that of rank 0, but sees all
    "not counted": (
        2,
        dict(tensor=dict(size=2)),
        "1f1b",
        [(1, "blocks.0.mlp_norm.weight")],
        "blocks.0.mlp_norm.weight",
    ),
    "zero": (2, dict(data=2, zero=3), "1f1b", [(1, UP)], UP),
}


@pytest.mark.rest("1d", "zero")
@pytest.mark.parametrize("name", but(("1f1b", "zb-h1"), CASES))
def test_all_ranks_skip_together(name: str) -> None:
    world, parallel, kind, places, of = CASES[name]
    found = run_ranks(world, _skip_and_raise, parallel, kind, places, with_context=False)
    what = f"step 2: the gradient of {of} is not finite, the loss is finite"
    assert found[0][0] == [f"{what}: the step is skipped (1 in a row, train.max_skips = 10)"]
    assert not any(lines for lines, _ in found[1:])
    (words,) = {words for _, words in found}
    assert words.startswith(f"{what}. The step changed nothing. train.on_nonfinite")


def _bad_loss(rank: int) -> str:
    faulty = Faulty(settings(dict(data=2, pipeline=2), on_nonfinite="raise"))
    loss_fn = faulty.engine._stages.loss_fn
    faulty.step(0)
    if rank == 3:
        faulty.engine._stages.loss_fn = lambda out, batch: (
            loss_fn(out, batch)[0] * float("inf"),
            loss_fn(out, batch)[1],
        )
    with pytest.raises(NonFiniteGradients) as raised:
        faulty.step(1)
    faulty.engine.close()
    return str(raised.value)


def test_a_loss_that_is_not_finite_is_told_on_all_ranks() -> None:
    (words,) = set(run_ranks(4, _bad_loss, with_context=False))
    assert words.startswith("step 2: the gradient of norm.bias, norm.weight, ")
    assert "is not finite, the loss is inf. The step changed nothing" in words


class RootOfZero(nn.Module):
    """The square root of 0 has no finite derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.late((self.early(x) * 0).sqrt())


def test_the_parameter_that_backward_came_to_first_is_named() -> None:
    """The last one before the operation that made it."""
    config = dict(train=dict(global_batch_size=2), device="cpu")
    engine = colossus.initialize(config, model=RootOfZero, loss_fn=lambda y, batch: (y.square().sum(), len(y)))
    with pytest.raises(NonFiniteGradients) as raised:
        engine.train_step(torch.randn(2, 3))
    assert raised.value.parameters == ["early.bias", "early.weight"]


class Sides(nn.Module):
    """Of which one has large gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.large(x).float() * 80000 + self.small(x).float()


def _overflow_in_a_sum(rank: int, zero: int) -> tuple[list[str], list[Any]]:
    """Each rank's gradient is 40000 at a loss scale of 1, which float16 has; it does not have their sum."""
    config = dict(
        parallel=dict(data=2, **(dict(zero=zero) if zero else {})),
        train=dict(global_batch_size=2, precision=dict(compute="fp16", reduce="fp16"), loss_scale=dict(init=1.0)),
        optimizer=dict(type="SGD", lr=1e-9),
        device="cpu",
    )
    with Messages() as messages:
        engine = colossus.initialize(config, model=Sides, loss_fn=lambda out, batch: (out.sum(), len(out)))
        results = [engine.train_step(torch.ones(1, 3)) for _ in range(2)]
    engine.close()
    return messages.lines, [result.skipped for result in results]


def _of_stages(rank: int) -> Any:
    return [_overflow_in_a_sum(rank, zero) for zero in (0, 2)]


def test_an_overflow_in_a_sum_is_skipped_on_all_ranks() -> None:
    others, first = run_ranks(2, _of_stages, with_context=False)[::-1]
    told = "step 1: the gradient of large.weight is not finite, the loss is finite: float16 overflowed"
    for lines, skipped in first:
        assert [line[: len(told)] for line in lines] == [told]
        assert skipped == [True, False]  # at half the scale it is 40000
    assert others == [([], [True, False])] * 2


# -- several in a row -----------------------------------------------------------------------------------------


def test_too_many_in_a_row() -> None:
    faulty = Faulty(settings({}, max_skips=2))
    bad = [(0, "norm.bias")]
    with Messages() as messages:
        for step, places in enumerate(([], bad, bad, [], bad, bad)):
            faulty.step(step % STEPS, places)
        with pytest.raises(NonFiniteGradients, match=r"is step 3 of that kind in a row, and train\.max_skips = 2; "):
            faulty.step(3, bad)
    assert [line.partition("skipped ")[2] for line in messages.lines] == [
        f"({number} in a row, train.max_skips = 2)" for number in (1, 2, 1, 2)
    ]
    faulty.engine.close()


# -- other strategies -----------------------------------------------------------------------------------------


def _local_steps(rank: int) -> tuple[list[str], list[bool]]:
    """Replica 1 skips its second step; both take part in the averages."""
    faulty = Faulty(settings(dict(data=2, strategy=dict(type=LocalSteps, every=2))))
    with Messages() as messages:
        results = [faulty.step(step, [(1, "norm.bias")] if step == BAD else ()) for step in range(STEPS)]
    weights = torch.cat([param.detach().flatten() for param in faulty.engine.model.parameters()])
    assert weights.isfinite().all()
    faulty.engine.close()

    plain = Faulty(settings(dict(data=2, strategy=dict(type=LocalSteps, every=2))))
    for step in range(STEPS):
        undo = plain.leave_out_update() if (rank, step) == (1, BAD) else lambda: None
        plain.step(step)
        undo()
    assert torch.equal(weights, torch.cat([param.detach().flatten() for param in plain.engine.model.parameters()]))
    plain.engine.close()
    return messages.lines, [result.skipped for result in results]


def test_a_replica_skips_alone_under_an_inexact_strategy() -> None:
    (lines0, skipped0), (lines1, skipped1) = run_ranks(2, _local_steps, with_context=False)
    assert (lines0, skipped0) == ([], [False] * STEPS)
    assert skipped1 == [False, True, False, False]
    (line,) = lines1
    assert "norm.bias is not finite" in line


# -- on an accelerator ----------------------------------------------------------------------------------------


class OneLate:
    """As `LateValue` on an accelerator."""

    def __init__(self) -> None:
        self._kept: float | None = None

    def push(self, value: Tensor) -> float | None:
        late, self._kept = self._kept, value.item()
        return late


def late(faulty: Faulty) -> None:
    """The watch's numbers come as from an accelerator."""
    watch: Any = faulty.engine.run.gradient_watch
    watch._is_late, watch._late_found = True, OneLate()


def test_where_nothing_waits_the_report_is_one_step_late() -> None:
    bad = [(0, "blocks.0.mlp.up.bias")]
    faulty = Faulty(settings({}))
    late(faulty)
    with Messages() as messages:
        results = [faulty.step(0), faulty.step(1, bad)]
        assert not messages.lines
        results += [faulty.step(2), faulty.step(3, bad)]  # the last of train.steps is waited for
    assert [result.skipped for result in results] == [False, True, False, True]
    assert [result.num_skipped for result in results] == [0, 1, 1, 2]
    told = "the gradient of blocks.0.mlp.up.bias is not finite, the loss is finite: the step is skipped (1 in a row"
    assert [line[: 8 + len(told)] for line in messages.lines] == [f"step 2: {told}", f"step 4: {told}"]

    faulty = Faulty(settings({}, on_nonfinite="raise"))
    late(faulty)
    faulty.step(0)
    before = faulty.state()
    faulty.step(1, bad)
    _same(faulty.state(), before)
    with pytest.raises(NonFiniteGradients, match=r"^step 2: the gradient of blocks\.0\.mlp\.up\.bias is"):
        faulty.step(2)
    _same(faulty.state(), before)


@pytest.mark.parametrize(
    "make", [partial(torch_optimizer, "AdamW"), partial(torch_optimizer, "SGD", momentum=0.9)], ids=["adamw", "sgd"]
)
def test_a_fused_optimizer_leaves_a_step_out_by_itself(make: Callable[..., torch.optim.Optimizer]) -> None:
    """As it does on an accelerator: torch's fused kernels on the CPU take the same attributes."""
    param = nn.Parameter(torch.arange(5.0))
    optimizer = make([param], lr=0.1)
    param.grad = torch.ones(5)
    optimizer.step()
    before = {key: value.clone() for key, value in [("param", param.detach()), *optimizer.state[param].items()]}
    for found, changes in ((True, False), (False, True)):
        with _skipped_where(optimizer, torch.tensor(found)):
            optimizer.step()
        after = {"param": param.detach(), **optimizer.state[param]}
        assert all(torch.equal(after[key], value) is not changes for key, value in before.items())
    assert not hasattr(optimizer, "found_inf")


def test_what_is_waited_for() -> None:
    """The meta device stands for an accelerator."""
    found, param = torch.ones((), device="meta"), nn.Parameter(torch.ones(2, device="meta"))
    param.grad = torch.ones_like(param)
    optimizer = torch_optimizer("SGD", [param], lr=0.1, momentum=0.9)
    assert skipping_on_device(optimizer, torch.ones(())) is None
    assert skipping_on_device(optimizer, found) is None  # torch would leave the momentum without a value
    optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)
    assert skipping_on_device(optimizer, found) is not None
    assert skipping_on_device(torch_optimizer("SGD", [param], lr=0.1), found) is not None
    assert skipping_on_device(torch_optimizer("SGD", [param], lr=0.1, fused=False), found) is None
    offloaded = torch_optimizer("SGD", [nn.Parameter(torch.ones(2))], lr=0.1)
    assert skipping_on_device(offloaded, found) is None
