"""Steps in which no label counts change nothing, on all ranks alike, and are told once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.long import but
from helpers.messages import Messages
from helpers.ranks import run_ranks
from helpers.training import BATCH, batch_of, config_of
from torch import Tensor, nn

import colossus
from colossus.state.model_state_dict import full_state_dict

STEPS, EMPTY = 5, (1, 3)


def _state(engine: Any) -> dict[str, Tensor]:
    """Weights of the whole model, the optimizer's state of this rank, and the scale of the loss."""
    state = dict(full_state_dict(engine.model, engine.context))
    for number, param in enumerate(engine.store.parameters()):
        state |= {f"{number}.{key}": value for key, value in engine.optimizer.state.get(param, {}).items()}
    if engine.loss_scaler is not None:
        state |= {f"scaler.{key}": value for key, value in engine.loss_scaler.state_dict().items()}
    return {name: torch.as_tensor(value).clone() for name, value in state.items()}


def _part(engine: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    index, part = engine.context.index("data"), BATCH // engine.context.size("data")
    return {key: value[index * part : (index + 1) * part] for key, value in batch.items()}


def _train(rank: int, config: dict[str, Any], **more: Any) -> tuple[list[Any], list[str]]:
    numbers = []
    with Messages() as messages:
        engine = colossus.initialize(config, **more)
        for step in range(STEPS):
            batch, before = batch_of(step), _state(engine)
            if step in EMPTY:
                batch["labels"].fill_(-100)
            result = engine.train_step(_part(engine, batch))
            assert (result.step, result.skipped) == (step + 1, step in EMPTY)
            if step in EMPTY:
                assert math.isnan(result.loss)
                assert result.tokens == 0
                after = _state(engine)
                assert all(torch.equal(after[name], value) for name, value in before.items() if step)
            else:
                numbers.append((result.loss, result.lr, result.tokens))
    assert engine.completed_steps == STEPS
    engine.close()
    return numbers, messages.lines


PLANS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "data": (2, dict(data=2), {}),
    "zero 3": (2, dict(data=2, zero=3), {}),
    "pipeline": (2, dict(pipeline=2), dict(schedule=dict(type="1f1b", microbatches=2))),
    "sequence": (2, dict(sequence=2), {}),
    "fp16": (2, dict(data=2), dict(train=dict(loss_scale=dict(growth_interval=2)))),
    "2d": (4, dict(tensor=dict(mode="2d", size=4)), {}),
    "zero 2": (2, dict(data=2, zero=2), {}),
}


@pytest.mark.parametrize("name", but(("2d", "zero 2", "data", "sequence", "fp16"), PLANS))
def test_a_step_without_labels_changes_nothing(name: str) -> None:
    world, parallel, more = PLANS[name]
    precision = "fp16" if name == "fp16" else "fp64"
    results = run_ranks(world, _train, config_of(parallel, STEPS, precision, **more), with_context=False)
    for numbers, _ in results:
        assert numbers == results[0][0]
    messages = [line for _, lines in results for line in lines]
    assert len(messages) == 1
    assert "step 2: no label counts" in messages[0]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(53, 8), nn.Linear(8, 53)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids))


def mean_times_count(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """nan, with gradients that are nan, where no label counts."""
    count = (batch["labels"] != -100).sum()
    return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten()) * count, count


def test_a_loss_that_is_nan_without_labels_does_not_matter() -> None:
    config = {key: value for key, value in config_of(dict(data=2), STEPS, "fp64").items() if key != "model"}
    for numbers, _ in run_ranks(
        2, lambda rank: _train(rank, config, model=Classifier, loss_fn=mean_times_count), with_context=False
    ):
        assert len(numbers) == STEPS - len(EMPTY)
        assert all(math.isfinite(loss) for loss, *_ in numbers)


def _half(rank: int, parallel: dict[str, Any], microbatches: int) -> list[float]:
    """Only the first half of the samples has labels."""
    engine = colossus.initialize(config_of(parallel, STEPS, "fp64", schedule=dict(microbatches=microbatches)))
    losses = []
    for step in range(STEPS):
        batch = batch_of(step)
        batch["labels"][BATCH // 2 :] = -100
        losses.append(engine.train_step(_part(engine, batch)).loss)
    engine.close()
    return losses


def test_a_rank_or_a_microbatch_without_labels_counts_nothing() -> None:
    alone = run_ranks(1, _half, {}, 1, with_context=False)[0]
    torch.testing.assert_close(run_ranks(1, _half, {}, 2, with_context=False)[0], alone, rtol=1e-10, atol=0)
    for losses in run_ranks(2, _half, dict(data=2, zero=1), 1, with_context=False):
        torch.testing.assert_close(losses, alone, rtol=1e-10, atol=0)
