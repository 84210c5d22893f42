"""What may go between stages: nests of tensors with and without gradients, shapes that change, plain torch models."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.long import but
from helpers.ranks import RankError, run_ranks
from torch import Tensor, nn

import colossus
from colossus.layers import PipelineBlock
from colossus.state.model_state_dict import full_state_dict

WIDTH = 10


class Lookup(nn.Module):
    """Starts with an operation in place, and passes on a dict: values, a mask, positions, a number and a name."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        rows = self.table(batch["ids"])
        x = rows * 2.0
        return {
            "x": x,
            "skip": (rows.sin() * self.scale, [batch["keep"], torch.arange(x.shape[1])]),
            "twice": x,  # one tensor in two places: what happens to one of them in place happens to both
            "unused": rows.cos(),
            "name": "lookup",
            "number": 3,
            "nothing": None,
        }


class Mix(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.kernel = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        assert value["name"] == "lookup"
        assert value["number"] == 3
        assert value["nothing"] is None
        x, (skip, (keep, positions)) = value["x"], value["skip"]
        assert keep.dtype == torch.bool
        assert positions.dtype == torch.int64
        x.mul_(1.5)  # in place on what has just arrived, as a Sequential of ReLU(inplace=True) would
        mixed = self.linear(self.norm(x)) + self.kernel(skip.transpose(1, 2)).transpose(1, 2)
        mixed = mixed + value["twice"] * positions[:, None] * 0.1
        return {**value, "x": x + torch.tanh(mixed) * keep[..., None], "skip": (skip + mixed, [keep, positions])}


class Chain(nn.Module):
    """A user's model: plain torch modules, a weight tied from end to end, no word of parallelism but its blocks."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.lookup = Lookup()
        self.mixes = nn.ModuleList(Mix() for _ in range(depth))
        self.bias = nn.Parameter(torch.zeros(13))

    def pipeline_blocks(self) -> list[Any]:
        return [self.lookup, *self.mixes, PipelineBlock(self.logits, "lookup.table", "bias", name="logits")]

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        value = self.lookup(batch)
        for mix in self.mixes:
            value = mix(value)
        return self.logits(value)

    def logits(self, value: dict[str, Any]) -> Tensor:
        x, (skip, _) = value["x"], value["skip"]
        return F.linear(x + skip, self.lookup.table.weight, self.bias)


def loss(logits: Tensor, batch: dict[str, Any]) -> tuple[Tensor, int]:
    labels = batch["labels"]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()


def batch_of(step: int, samples: int, tokens: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, 13, (samples, tokens), generator=generator)
    keep = torch.rand(samples, tokens, generator=generator) > 0.3
    return {"inputs": {"ids": ids, "keep": keep}, "labels": (ids + 1) % 13}


#: (samples, tokens) of each step: other lengths, a smaller last batch, and the first shape again
SHAPES = [(6, 5), (6, 9), (3, 5), (6, 5), (12, 2)]


def train(
    rank: int,
    plan: dict[str, Any],
    schedule: dict[str, Any],
    **comm: Any,
) -> tuple[list[tuple[float, float]], dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    settings = dict(
        parallel=plan,
        schedule=schedule,
        optimizer=dict(type="AdamW", lr=1e-2),
        train=dict(global_batch_size=6, precision="fp64", clip_grad_norm=0.5, seed=5),
        comm=comm,
        device="cpu",
    )
    engine = colossus.initialize(settings, model=Chain, loss_fn=loss)
    start = full_state_dict(engine.model, engine.context)
    numbers = []
    for step, shape in enumerate(SHAPES):
        result = engine.train_step(batch_of(step, *shape))
        numbers.append((result.loss, result.grad_norm))
    gradients = full_state_dict(engine.model, engine.context, gradients=True)
    end = full_state_dict(engine.model, engine.context)
    engine.close()
    return numbers, start, gradients, end


def in_plain_torch(start: dict[str, Tensor]) -> tuple[list[tuple[float, float]], dict[str, Tensor], dict[str, Tensor]]:
    """The same training by hand, in one process, with nothing of ours."""
    model = Chain().double()
    model.load_state_dict(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)
    numbers = []
    for step, shape in enumerate(SHAPES):
        batch = batch_of(step, *shape)
        total, count = loss(model(batch["inputs"]), batch)
        optimizer.zero_grad()
        (total / count).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        numbers.append(((total / count).item(), norm.item()))
        optimizer.step()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return numbers, gradients, dict(model.named_parameters())  # type: ignore[return-value]


PLANS: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "1f1b 4": (4, dict(pipeline=4), dict(type="1f1b", microbatches=3), {}),
    "interleaved": (2, dict(pipeline=2), dict(type="interleaved", microbatches=3, chunks=4), {}),
    "zb-h1": (4, dict(pipeline=4), dict(type="zb-h1", microbatches=3), {}),
    "zb-v": (2, dict(pipeline=2), dict(type="zb-v", microbatches=3), {}),
    "zb-v c10d": (4, dict(pipeline=4), dict(type="zb-v", microbatches=3), dict(shared_memory=False)),
}


@pytest.mark.parametrize("name", but(("1f1b 4", "interleaved", "zb-v", "zb-v c10d"), PLANS))
def test_nests_ties_and_changing_shapes_are_plain_torch(name: str) -> None:
    world, plan, schedule, comm = PLANS[name]
    results = run_ranks(world, partial(train, **comm), plan, schedule, with_context=False)
    numbers, gradients, weights = in_plain_torch(results[0][1])
    for mine, _, mine_gradients, mine_weights in results:
        for (value, norm), (other, other_norm) in zip(mine, numbers, strict=True):
            assert abs(value - other) < 1e-10 * abs(other)
            assert abs(norm - other_norm) < 1e-10 * other_norm
        assert mine_gradients.keys() == gradients.keys()
        for key, wanted in gradients.items():
            torch.testing.assert_close(mine_gradients[key], wanted, rtol=1e-8, atol=1e-11, msg=f"gradient of {key}")
        for key, wanted in weights.items():
            torch.testing.assert_close(mine_weights[key], wanted, rtol=1e-8, atol=1e-10, msg=key)


# -- any Sequential ---------------------------------------------------------------------------------------------


# -- hooks on weights ---------------------------------------------------------------------------------------------


# -- what is refused --------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Two stages; the first returns what ``how`` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0
        self.table = nn.Embedding(13, WIDTH)
        self.head = nn.Linear(WIDTH, 13)

    def pipeline_blocks(self) -> list[Any]:
        return [PipelineBlock(self.first, "table"), PipelineBlock(self.second, "head")]

    def first(self, batch: dict[str, Tensor]) -> Any:
        self.calls += 1
        x = self.table(batch["ids"])
        if self.how == "object":
            return {"x": x, "config": object()}
        if self.how == "detached":
            return x.detach()
        if self.how == "changing":
            return x if self.calls < 3 else (x, x)
        return x

    def second(self, x: Any) -> Tensor:
        return self.head(x if isinstance(x, Tensor) else x[0])


WRONG = {
    "object": r"stage 0 returned object at \['config'\]; a stage must pass a tensor to the next, or a nest",
    "detached": r"stage 0 returned float64\[2, 5, 10\] \(no gradient\), in which nothing requires a gradient",
    "changing": r"stage 0 returned \(float64\[2, 5, 10\], tensor 0 again\) for microbatch 2, but float64",
}


def _odd(how: str, microbatches: int = 3, timeout_seconds: float = 10.0) -> Any:
    """An engine of two stages, the first of which returns what ``how`` says."""
    settings = dict(
        parallel=dict(pipeline=2),
        schedule=dict(microbatches=microbatches),
        train=dict(global_batch_size=6, precision="fp64"),
        comm=dict(timeout_seconds=timeout_seconds),
        device="cpu",
    )
    return colossus.initialize(settings, model=lambda: Odd(how), loss_fn=loss)


def _train_odd(rank: int, how: str) -> None:
    engine = _odd(how)
    for step in range(3):
        engine.train_step(batch_of(step, 6, 5))


@pytest.mark.parametrize("how", WRONG)
def test_what_a_stage_must_not_return(how: str) -> None:
    """The rank that did it says what is wrong, and the other one ends because it is gone, at once."""
    with pytest.raises(RankError, match=WRONG[how]) as caught:
        run_ranks(2, _train_odd, how, with_context=False, timeout=30)
    assert "Connection closed by peer" in str(caught.value)


def _other_batches(rank: int) -> None:
    engine = _odd("right", microbatches=1, timeout_seconds=5.0)
    engine.train_step(batch_of(0, 6, 5))
    engine.train_step(batch_of(0, 6, 7))
    engine.train_step(batch_of(0, 6, 5 if rank else 7))


def test_ranks_with_batches_of_other_shapes() -> None:
    with pytest.raises(RankError, match=r"sent something else .* or were given other batches"):
        run_ranks(2, _other_batches, with_context=False, timeout=30)
