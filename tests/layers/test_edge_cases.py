"""What users do at the edges: layers used late or on one sample, odd grids, learned masks, errors that are caught."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.long import long
from helpers.plans import plans
from helpers.ranks import RankError, grid, run_ranks
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.context.parallel_context import ParallelContext
from colossus.state.model_state_dict import full_state_dict, load_full_state_dict

PLANS = plans("data2_1d", "1d_sharded", "2d", "2d_4x1", "3d", "3d_2x1x2", "3d_4x1x1")
BATCH, TOKENS, HIDDEN = 8, 4, 8


def squares(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return outputs.square().sum(), len(outputs)


def _train(
    rank: int, parallel: dict[str, Any], factory: Callable[[], nn.Module], loss: Any, batches: Any, more: Any = None
) -> Any:
    config = dict(parallel=parallel, optimizer=dict(type="SGD", lr=0.05), device="cpu",
                  train=dict(global_batch_size=len(batches[0]["inputs"]), precision="fp64", seed=5))  # fmt: skip
    engine = colossus.initialize(config | (more or {}), model=factory, loss_fn=loss)
    index, count = engine.context.index("data"), engine.context.size("data")
    numbers = []
    for batch in batches:
        part = {key: value.chunk(count)[index] for key, value in batch.items()}
        result = engine.train_step(part)
        numbers += [result.loss, result.grad_norm]
    vectors = {name: value.clone() for name, value in engine.model.named_parameters() if value.dim() < 2}
    return numbers, full_state_dict(engine.model, engine.context), vectors


def same_run(
    plan: str, factory: Callable[[], nn.Module], loss: Any = squares, steps: int = 3, batch: int = BATCH, **more: Any
) -> None:
    """Losses, norms and weights of a few steps equal those of one process; copies of small parameters stay equal."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for step in range(steps):
        batch_of_step = {"inputs": torch.randn(batch, TOKENS, HIDDEN, generator=generator, dtype=torch.float64)}
        batch_of_step["step"] = torch.full((batch,), step)
        batch_of_step.update({key: value(generator) for key, value in more.items()})
        batches.append(batch_of_step)
    ((numbers, state, _),) = run_ranks(1, _train, {}, factory, loss, batches, with_context=False)
    world, parallel = PLANS[plan]
    ranks = run_ranks(world, _train, parallel, factory, loss, batches, with_context=False)
    for mine, weights, _ in ranks:
        assert mine == pytest.approx(numbers, rel=1e-10)
        for name, value in state.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-11, msg=name)


class Late(nn.Module):
    """A block that takes part from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.late = layers.Linear(HIDDEN, HIDDEN), layers.TransformerBlock(HIDDEN, 2)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.steps:
            x = layers.to_whole(self.late(layers.to_residual(x)))
        self.steps += 1
        return x


@pytest.mark.parametrize("plan", ["1d_sharded", "3d_2x1x2", *long("2d", "data2_1d", "3d")])
def test_a_layer_first_used_in_a_later_step(plan: str) -> None:
    same_run(plan, Late)


class Sometimes(nn.Module):
    """A norm that only some data ranks use in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = layers.Linear(HIDDEN, HIDDEN), layers.LayerNorm(HIDDEN)

    def forward(self, batch: Tensor) -> Tensor:
        x = self.first(batch)
        return self.norm(x) if batch.sum() > 0 else x


def _sometimes(rank: int) -> list[Tensor]:
    config = dict(
        parallel=dict(data=2), train=dict(global_batch_size=4), optimizer=dict(type="SGD", lr=0.1), device="cpu"
    )
    engine = colossus.initialize(config, model=Sometimes, loss_fn=squares)
    sign = 1.0 if rank == 0 else -1.0
    for _ in range(2):
        engine.train_step(torch.ones(2, HIDDEN) * sign)
    return [value.detach().clone() for value in engine.model.parameters()]


def test_a_layer_used_on_one_rank_only() -> None:
    first, second = run_ranks(2, _sometimes, with_context=False)
    for mine, other in zip(first, second, strict=True):
        assert torch.equal(mine, other)


def classes(outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    return layers.cross_entropy(outputs, batch["labels"])


class Classes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = layers.Classifier(HIDDEN, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.mean(1))


@pytest.mark.parametrize("plan", ["3d_2x1x2", *long("2d_4x1", "3d_4x1x1", "2d", "3d")])
def test_padding_never_reaches_a_loss(plan: str) -> None:
    same_run(plan, Classes, classes, labels=lambda generator: torch.randint(0, 10, (BATCH,), generator=generator))


class Drops(nn.Module):
    def __init__(self, keep: bool) -> None:
        super().__init__()
        self.inner, self.drop, self.keep = layers.Linear(HIDDEN, HIDDEN), nn.Dropout(0.5), keep

    def forward(self, x: Tensor) -> Tensor:
        def part(y: Tensor) -> Tensor:
            return self.drop(torch.tanh(self.inner(y)))

        return part(x) if self.keep else layers.recompute(part, x, context=self.inner.context)


def test_recomputation_repeats_torchs_own_draws() -> None:
    batch = {"inputs": torch.ones(BATCH, TOKENS, HIDDEN, dtype=torch.float64)}
    runs = [
        run_ranks(1, _train, {}, lambda k=keep: Drops(k), squares, [batch], with_context=False)
        for keep in (True, False)
    ]
    assert runs[0][0][0] == runs[1][0][0]


def test_positions_inside_a_pair_are_refused() -> None:
    def body(context: Any) -> None:
        up = lambda: layers.Linear(HIDDEN, HIDDEN, split="column")  # noqa: E731
        model: Any = colossus.build(lambda: nn.Sequential(up(), layers.PositionEmbedding(TOKENS, HIDDEN)), context)
        model(torch.ones(2, TOKENS, HIDDEN))

    with pytest.raises(RankError, match="inside a column/row pair"):
        run_ranks(2, body)


def _caught(rank: int) -> float:
    config = dict(parallel=dict(tensor=dict(mode="2d", size=4, weights="step")), device="cpu",
                  train=dict(global_batch_size=4), optimizer=dict(type="SGD", lr=0.1))  # fmt: skip

    def loss(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
        if batch[0].max() > 5:
            raise ArithmeticError("a bad batch")
        return squares(outputs, batch)

    engine = colossus.initialize(config, model=lambda: layers.Linear(HIDDEN, HIDDEN), loss_fn=loss)
    with pytest.raises(ArithmeticError):
        engine.train_step((torch.full((4, HIDDEN), 9.0),))
    zeros = {name: torch.zeros_like(value) for name, value in full_state_dict(engine.model, engine.context).items()}
    load_full_state_dict(engine.model, zeros, engine.context)
    with engine.context, torch.no_grad():
        return float(engine.model(torch.ones(2, HIDDEN)).abs().sum())


def test_a_step_that_raised_leaves_no_weights_behind() -> None:
    assert run_ranks(4, _caught, with_context=False) == [0.0] * 4


def test_nan_is_never_right() -> None:
    right, count = layers.accuracy(torch.full((4, 3), float("nan")), torch.tensor([0, 1, 2, 0]))
    assert (right.item(), count.item()) == (0.0, 4.0)


def test_a_padding_row_starts_at_zero_as_torchs_does() -> None:
    weight: Any = colossus.build(lambda: layers.Embedding(5, 3, padding_idx=-2)).weight
    assert weight.abs().sum(1).eq(0).tolist() == [False, False, False, True, False]


def in_place() -> nn.Module:
    """Plain linears, each followed by a function in place."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(inplace=True)) for _ in range(4)),
    )


def test_functions_in_place_behind_plain_linears_of_a_split_backward() -> None:
    batches = [{"inputs": torch.randn(BATCH, TOKENS, HIDDEN, dtype=torch.float64)}] * 3
    ((expected, *_),) = run_ranks(1, _train, {}, in_place, squares, batches, with_context=False)
    for kind in ("zb-h1", "1f1b"):
        more = dict(schedule=dict(type=kind, microbatches=4))
        for numbers, *_ in run_ranks(2, _train, dict(pipeline=2), in_place, squares, batches, more, with_context=False):
            assert numbers == pytest.approx(expected, rel=1e-10)


# -- sizes of numpy, validation before training -------------------------------------------------------------------


@pytest.mark.parametrize("axis", ["tensor", "sequence"])
def test_a_validation_in_inference_mode_leaves_nothing_that_training_cannot_use(axis: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions = layers.PositionEmbedding(8, 8)
            self.block = layers.TransformerBlock(8, 2, rotary=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.positions(x))

    def body(context: ParallelContext) -> bool:
        model = colossus.build(Model, context)
        x = torch.ones(2, 4, 8)
        with context:
            with torch.inference_mode():
                model(x)
            model(x).sum().backward()
        return all(parameter.grad is not None for parameter in model.parameters())

    assert run_ranks(2, body, plan=grid(**{axis: 2})) == [True] * 2
