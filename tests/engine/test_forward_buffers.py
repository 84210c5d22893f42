"""Buffers that a forward changes from its samples: the same on all ranks, and those of one process."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.long import long
from helpers.ranks import run_ranks
from helpers.user_models.cases import WIDTH, Kit, PlainKit, draw, squared
from helpers.user_models.features import Block
from helpers.user_models.table import Plan
from torch import Tensor, nn

import colossus
from colossus.state.model_state_dict import full_state_dict

STEPS, LR, CODES = 3, 0.05, 4
PLANS: dict[str, Plan] = {
    "data 2": Plan(2, dict(data=2), {}),
    "data 2 microbatches 2": Plan(2, dict(data=2), dict(microbatches=2)),
    "data 3 zero 3": Plan(3, dict(data=3, zero=3), {}),
    "2d 4": Plan(4, dict(tensor=dict(mode="2d", size=4)), {}),
    "3d 4 (2,1,2)": Plan(4, dict(tensor=dict(mode="3d", size=4, shape=(2, 1, 2))), {}),
    "pipeline 2 x data 2": Plan(4, dict(pipeline=2, data=2), dict(type="1f1b", microbatches=2)),
    "data 2 x 1d 2": Plan(4, dict(data=2, tensor=2), {}),
}
SAMPLES = 12


class Running(nn.Module):
    """A running mean that its output depends on, written in place; a count; a mean that is put in the buffer's place;
    one that torch does not see written to; in evaluation another one."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("mean", "square", "hidden", "evaluated"):
            self.register_buffer(name, torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("constant", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        x, rows = (x - self.mean) * (1 + self.square), x.detach()
        if self.training:
            self.mean.lerp_(rows.mean(0), 0.2)
            self.square = 0.9 * self.square + 0.1 * rows.square().mean(0)
            self.hidden.data.mul_(0.5).add_(rows.mean(0), alpha=0.5)
            self.count += 1
        else:
            self.evaluated.lerp_(rows.mean(0), 0.5)
        return x


class Codebook(nn.Module):
    """The nearest code; codes follow the mean of all samples that are weighted by their nearness."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.linspace(-1, 1, CODES * WIDTH).view(CODES, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            near = (-torch.cdist(x, self.codes)).softmax(-1)
            code = near @ self.codes
            if self.training:
                self.codes += 0.1 * (near.T @ x) / len(x)
        return x + (code - x).detach() * 0.5


class Net(nn.Module):
    def __init__(self, kit: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Running(), Block(kit), Codebook(), Running(), nn.Linear(WIDTH, 3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def pipeline_blocks(self) -> list[nn.Module]:
        return [*self.blocks]


def batch_of(step: int) -> dict[str, Tensor]:
    return {"inputs": draw(step, SAMPLES, WIDTH)}


def config_of(plan: Plan, folder: Path | None = None, **train: Any) -> dict[str, Any]:
    return dict(
        parallel=plan.parallel,
        schedule=plan.schedule,
        optimizer=dict(type="SGD", lr=LR),
        train=dict(global_batch_size=SAMPLES, precision="fp64", seed=3, samples_interact=True, **train),
        checkpoint=dict(dir=str(folder), resume="auto") if folder else {},
        comm=dict(timeout_seconds=20.0),
        device="cpu",
    )


def own_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in model.named_buffers()}


def train(rank: int, plan: Plan, folder: Path | None = None) -> Any:
    """Losses of steps and evaluations, the state, this rank's buffers, what is logged; the run goes on from a
    checkpoint after the second step."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("colossus.engine").addHandler(handler)
    losses: list[float] = []
    start: dict[str, Tensor] = {}
    for steps in (range(2), range(2, STEPS)) if folder else (range(STEPS),):
        engine = colossus.initialize(config_of(plan, folder), model=lambda: Net(Kit), loss_fn=squared)
        start = start or full_state_dict(engine.model, engine.context)
        if steps.start:
            engine.checkpoints.resume()
        index, count = (getattr(engine.context, name)("data") for name in ("index", "size"))
        for step in steps:
            own = {key: x.chunk(count)[index] for key, x in batch_of(step).items()}
            losses += [engine.train_step(own).loss, engine.eval_step(own).loss]
        if folder and not steps.start:
            engine.checkpoints.save().wait()
        end, own = full_state_dict(engine.model, engine.context), own_buffers(engine.model)
        engine.close()
    return losses, start, end, own, messages


@cache
def plainly(microbatches: int) -> Any:
    """Plain torch from the start of one process of ours."""
    _, start, *_ = run_ranks(1, train, Plan(1, {}, {}), with_context=False)[0]
    net = Net(PlainKit).double()
    net.load_state_dict(start)
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=LR), []
    for step in range(STEPS):
        x = batch_of(step)["inputs"]
        optimizer.zero_grad()
        net.train()
        total = sum(squared(net(x[first::microbatches]), {})[0] for first in range(microbatches)) / len(x)
        total.backward()
        optimizer.step()
        losses.append(float(total.detach()))
        with torch.no_grad():
            losses.append(float(squared(net.eval()(x), {})[0] / len(x)))
    return losses, net.state_dict()


@pytest.mark.parametrize("plan", ["data 2 microbatches 2", "pipeline 2 x data 2", *long(
    *(name for name in PLANS if name not in ("data 2 microbatches 2", "pipeline 2 x data 2")))])  # fmt: skip
def test_buffers_are_those_of_one_process(plan: str, tmp_path: Path) -> None:
    losses, end = plainly(PLANS[plan].schedule.get("microbatches", 1))
    ranks = run_ranks(PLANS[plan].world, train, PLANS[plan], tmp_path, with_context=False)
    values: dict[str, Tensor] = {}
    for rank, (own_losses, _, state, own, messages) in enumerate(ranks):
        assert own_losses == pytest.approx(losses, rel=1e-10), rank
        for name, value in end.items():
            torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-10, msg=f"{name} on rank {rank}")
        for name, value in own.items():
            assert torch.equal(value, values.setdefault(name, value)), f"{name} differs on rank {rank}"
        assert not any("buffers differ between ranks" in line for line in messages)
        lines = [line for line in messages if "a forward changes buffers" in line]
        if rank == 0:
            assert "(blocks.0.mean, blocks.0.square, blocks.0.hidden" in lines[0]
            assert "averaged over them (train.buffers = 'average')" in lines[0]
    assert any("blocks.2.codes" in line for *_, messages in ranks for line in messages)


def test_those_of_the_first_rank_by_the_key() -> None:
    """As DDP has them; a codebook that is a queue, say. Integers are the first rank's under both."""

    class Queue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 3)
            self.register_buffer("queue", torch.zeros(4, WIDTH))
            self.register_buffer("seen", torch.zeros(WIDTH, dtype=torch.long))
            self.register_buffer("is_positive", torch.zeros(WIDTH, dtype=torch.bool))

        def forward(self, x: Tensor) -> Tensor:
            self.queue = torch.cat((x.detach(), self.queue))[:4]
            self.seen += (x > 0).sum(0)
            self.is_positive.copy_(x[0] > 0)
            return self.linear(x) + self.queue.mean()

    def body(rank: int, how: str) -> dict[str, Tensor]:
        config = config_of(Plan(2, dict(data=2), {}), buffers=how)
        engine = colossus.initialize(config, model=Queue, loss_fn=squared)
        for step in range(2):
            engine.train_step(batch_of(step)["inputs"].chunk(2)[rank])
        return own_buffers(engine.model)

    x, other = (torch.stack([batch_of(step)["inputs"].chunk(2)[rank] for step in range(2)]) for rank in range(2))
    for how, queue in (("first", x[1, :4]), ("average", (x[1, :4] + other[1, :4]) / 2)):
        for buffers in run_ranks(2, body, how, with_context=False):
            torch.testing.assert_close(buffers["queue"], queue, rtol=1e-12, atol=1e-12)
            assert torch.equal(buffers["seen"], (x > 0).sum((0, 1)))
            assert torch.equal(buffers["is_positive"], x[1, 0] > 0)


def test_what_one_ranks_samples_change_alone_is_averaged() -> None:
    """Written as ``buffer.data`` in the first step, whose values are looked at."""

    class Hits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("first", torch.zeros(3))
            self.register_buffer("second", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            buffer = self.first if x[0, 0] > 0 else self.second
            buffer.data += 2.0
            return self.layer(x)

    def body(rank: int) -> list[list[float]]:
        config = dict(
            parallel=dict(data=2), optimizer=dict(type="SGD", lr=0.1), train=dict(global_batch_size=2), device="cpu"
        )
        engine = colossus.initialize(config, model=Hits, loss_fn=lambda x, _: (x.square().sum(), len(x)))
        engine.train_step(torch.full((1, 2), 1.0 - 2 * rank))
        values = [engine.model.first.tolist(), engine.model.second.tolist()]
        engine.close()
        return values

    assert run_ranks(2, body, with_context=False) == [[[1.0] * 3, [1.0] * 2]] * 2


def test_a_checkpoint_says_whose_buffers_it_has(tmp_path: Path) -> None:
    """Where something else than a forward has changed them."""

    def body(rank: int) -> tuple[list[str], Tensor, Tensor]:
        messages: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("colossus.engine").addHandler(handler)
        config = config_of(Plan(2, dict(data=2), {}), tmp_path)
        engine = colossus.initialize(config, model=lambda: Net(Kit), loss_fn=squared)
        net: Any = engine.model
        engine.train_step(batch_of(0)["inputs"].chunk(2)[rank])
        net.blocks[0].constant.fill_(rank + 2.0)
        engine.checkpoints.save().wait()
        engine.close()
        engine = colossus.initialize(config, model=lambda: Net(Kit), loss_fn=squared)
        engine.checkpoints.resume()
        return messages, engine.model.blocks[0].constant, engine.model.blocks[0].mean

    ranks = run_ranks(2, body, with_context=False)
    for rank, (messages, constant, mean) in enumerate(ranks):
        lines = [line for line in messages if "buffers differ between ranks (blocks.0.constant)" in line]
        assert len(lines) == (rank == 0)
        assert torch.equal(constant, torch.full((2,), rank + 2.0, dtype=torch.float64))
        assert torch.equal(mean, ranks[0][2])
