"""Batches as transformers' collators give them: a dict of the model's keyword arguments, its labels beside them."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.user_models.table import PLANS
from torch import Tensor, nn

import colossus
from colossus.data.model_input import model_input, sequence_length
from colossus.engine.inputs import ForwardCall
from colossus.engine.nonfinite import tokens_per_sample
from colossus.layers.pipeline_block import PipelineBlock
from colossus.state.model_state_dict import full_state_dict

BATCH, TOKENS, VOCAB, HIDDEN, STEPS = 4, 4, 7, 8, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 12), nn.Linear(12, HIDDEN)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(torch.relu(self.up(h)))


class Masked(nn.Module):
    """Takes arguments in another order than the batch has them, and one that it does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, attention_mask: Tensor, input_ids: Tensor, scale: float = 1.0, **more: Any) -> Tensor:
        h = self.words(input_ids) * attention_mask[..., None].to(self.words.weight.dtype) * scale
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class Named(Masked):
    """Takes no other arguments: the weights are the loss function's."""

    def forward(self, attention_mask: Tensor, input_ids: Tensor, *, scale: float = 1.0) -> Tensor:  # type: ignore[override]
        return super().forward(attention_mask, input_ids, scale)


class Chain(nn.Module):
    """Blocks of its own, the first of which takes the one argument."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.block, self.head = nn.Embedding(VOCAB, HIDDEN), Block(), nn.Linear(HIDDEN, VOCAB)

    def pipeline_blocks(self) -> list[Any]:
        return [PipelineBlock(self.words), self.block, self.head]

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.block(self.words(input_ids)))


def batch_of(step: int, kind: type[Any] = dict) -> Any:
    ids = (torch.arange(BATCH * TOKENS).view(BATCH, TOKENS) * 5 + step) % VOCAB
    labels = (ids * 3 + 1) % VOCAB
    of_loss = {"weights": torch.arange(1.0, BATCH + 1, dtype=torch.float64), "names": ["a"] * BATCH}
    return kind({"labels": labels, "input_ids": ids, "attention_mask": (ids != 2).long(), **of_loss})


def loss_fn(outputs: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, int]:
    losses = nn.functional.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    per_sample = losses.view(len(batch["labels"]), -1).sum(1) * batch["weights"]
    return per_sample.sum(), batch["labels"].numel()


def config_of(plan: str) -> dict[str, Any]:
    chosen = PLANS[plan]
    return dict(
        parallel=chosen.parallel,
        schedule=chosen.schedule,
        optimizer=dict(type="SGD", lr=0.1),
        train=dict(global_batch_size=BATCH, precision="fp64"),
        device="cpu",
    )


def train(rank: int, plan: str, factory: Callable[[], nn.Module], kind: type[Any]) -> tuple[Any, ...]:
    """Full weights before and after, losses, and an evaluation."""
    engine = colossus.initialize(config_of(plan), model=factory, loss_fn=loss_fn)
    start = {name: value.clone() for name, value in full_state_dict(engine.model, engine.context).items()}
    size = BATCH // engine.context.size("data")
    own = slice(engine.context.index("data") * size, (engine.context.index("data") + 1) * size)

    def part(step: int) -> Any:
        return kind({key: value[own] for key, value in batch_of(step).items()})

    losses = [float(engine.train_step(part(step)).loss) for step in range(STEPS)]
    evaluated = float(engine.eval_step(part(STEPS)).loss)
    end = {name: value.clone() for name, value in full_state_dict(engine.model, engine.context).items()}
    engine.close()
    return start, losses, evaluated, end


def require_plain(results: tuple[Any, ...], factory: Callable[[], nn.Module]) -> None:
    start, losses, evaluated, end = results
    model = factory().double()
    model.load_state_dict(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = ["input_ids"] if isinstance(model, Chain) else ["input_ids", "attention_mask"]

    def loss_of(step: int) -> Tensor:
        total, count = loss_fn(model(**{name: batch_of(step)[name] for name in names}), batch_of(step))
        return total / count

    for step, loss in enumerate(losses):
        optimizer.zero_grad()
        mine = loss_of(step)
        mine.backward()
        optimizer.step()
        assert abs(loss - mine.item()) < 1e-10
    assert abs(evaluated - loss_of(STEPS).item()) < 1e-10
    torch.testing.assert_close(end, dict(model.state_dict()), rtol=1e-10, atol=1e-10)


EXAMPLE = {name: batch_of(0)[name] for name in ("input_ids", "attention_mask")}
CASES: list[tuple[str, Callable[[], nn.Module], Callable[[], nn.Module], type[Any]]] = [
    ("one process", Named, Named, dict),
    ("data 2 zero 3", Masked, Masked, UserDict),  # as transformers' BatchEncoding is one
    ("1d 2", colossus.parallelize(Named), Named, dict),
    ("pipeline 2 1f1b", colossus.parallelize(Named, example=EXAMPLE), Named, dict),
    ("pipeline 2 1f1b", Chain, Chain, dict),
]


@pytest.mark.parametrize(("plan", "factory", "plain", "kind"), CASES)
def test_a_dict_without_inputs_is_keyword_arguments(plan: str, factory: Any, plain: Any, kind: type[Any]) -> None:
    results = run_ranks(PLANS[plan].world, train, plan, factory, kind, with_context=False)
    require_plain(results[0], plain)


def test_lengths_are_those_of_arguments_and_not_of_labels() -> None:
    ids, labels = torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 9, dtype=torch.int64)
    batch = {"labels": labels, "input_ids": ids}
    assert sequence_length(batch) == tokens_per_sample(batch) == 4
    assert [*model_input(UserDict(batch))] == ["input_ids"]
    assert model_input({"inputs": ids, "input_ids": labels}) is ids


def test_batches_that_do_not_fit_the_forward_are_refused() -> None:
    call = ForwardCall(Chain(), is_partitioned=False)
    batch = {"ids": torch.zeros(1, 2), "labels": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"forward of Chain takes input_ids, and the batch has ids, labels: rename"):
        call(lambda **arguments: arguments, model_input(batch), batch)

    class Two(Chain):
        def forward(self, input_ids: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(input_ids) * scale

    batch = {"input_ids": torch.zeros(1, 2), "scale": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"first pipeline block of Two takes one input, .* \(input_ids, scale\)"):
        ForwardCall(Two(), is_partitioned=True)(lambda x: x, model_input(batch), batch)
