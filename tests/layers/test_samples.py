"""Losses and layers that look at several samples: the run of plain torch in one process, under every plan."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.long import long
from helpers.ranks import grid_of, run_ranks
from helpers.user_models.cases import BATCH, WIDTH, Batch, Kit, PlainKit, draw, integers
from helpers.user_models.features import Block
from helpers.user_models.table import PLANS as OTHER_PLANS
from helpers.user_models.table import Plan, Run, difference
from torch import Tensor, nn

import colossus
from colossus.comm import accounting
from colossus.context.parallel_context import ParallelContext
from colossus.layers import gather_samples, mean_over_samples
from colossus.state.model_state_dict import full_state_dict

STEPS, LR, SIZE = 2, 0.05, 4

PLANS: dict[str, Plan] = {
    "data 2 zero 3 microbatches 2": Plan(2, dict(data=2, zero=3), dict(microbatches=2)),
    "data 4": Plan(4, dict(data=4), {}),
    "data 2 x 2d 4": Plan(8, dict(data=2, tensor=dict(mode="2d", size=4)), {}),
    "2d 4 microbatches 2": Plan(4, dict(tensor=dict(mode="2d", size=4)), dict(microbatches=2)),
    **{
        name: OTHER_PLANS[name]
        for name in ("microbatches 2", "data 2 zero 3", "1d 2", "2d 4", "2.5d 8", "3d 4 (2,1,2)", "3d 8",
                     "data 2 x 1d 2", "pipeline 2 x data 2 1f1b", "pipeline 2 x 1d 2 zb-h1")
    },
}  # fmt: skip
#: what runs by default
SOME = ("data 2 zero 3 microbatches 2", "2d 4")


class Chain(nn.Module):
    """Two vectors of each sample."""

    def __init__(self, kit: Any, *middle: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(kit), *middle, nn.Linear(WIDTH, 2 * SIZE)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def pipeline_blocks(self) -> list[nn.Module]:
        return [*self.blocks]


class Centered(nn.Module):
    """Whitened by the statistics of the batch, and moved by what the samples most like each have."""

    def forward(self, x: Tensor) -> Tensor:
        mean = mean_over_samples(x)
        x = (x - mean) / (mean_over_samples((x - mean) ** 2) + 1e-3).sqrt()
        every = gather_samples(x)
        return x + (x @ every.T).softmax(-1) @ every


def clip(out: Tensor, batch: Batch) -> tuple[Tensor, int]:
    """The mean over all samples, counted by a rank's own."""
    one, other = (F.normalize(gather_samples(features), dim=-1) for features in out.chunk(2, -1))
    logits, labels = 5.0 * one @ other.T, torch.arange(len(one))
    loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
    return loss * len(out), len(out)


def sum_of_all(out: Tensor, batch: Batch) -> tuple[Tensor, int]:
    """The sum over all samples, the same on all ranks."""
    one, other = gather_samples(out).chunk(2, -1)
    return F.cross_entropy(one @ other.T, torch.arange(len(one)), reduction="sum"), len(one)


def own_rows(out: Tensor, batch: Batch) -> tuple[Tensor, int]:
    """A rank's own samples against all, by classes that are gathered, too."""
    out = F.normalize(out, dim=-1)
    same = batch["labels"][:, None] == gather_samples(batch["labels"])
    chances = (out @ gather_samples(out).T / 0.5).log_softmax(-1)
    return -((chances * same).sum(-1) / same.sum(-1)).sum(), len(out)


def vicreg(out: Tensor, batch: Batch) -> tuple[Tensor, int]:
    every = gather_samples(out)
    centered, (one, other) = every - every.mean(0), out.chunk(2, -1)
    covariance = centered.T @ centered / (len(every) - 1)
    spread = (mean_over_samples(out.square()) - mean_over_samples(out).square() + 1e-4).sqrt()
    loss = F.relu(1 - spread).mean() + (covariance - covariance.diag().diag()).square().sum() / SIZE
    return loss * len(out) + (one - other).square().mean(-1).sum(), len(out)


def squared(out: Tensor, batch: Batch) -> tuple[Tensor, int]:
    return (out - 0.3).square().sum(), len(out)


CASES: dict[str, tuple[Callable[[Any], nn.Module], Any]] = {
    "clip": (Chain, clip),
    "sum of all": (Chain, sum_of_all),
    "own rows": (Chain, own_rows),
    "vicreg": (Chain, vicreg),
    "in the forward": (lambda kit: Chain(kit, Centered()), squared),
}


def batch_of(step: int) -> Batch:
    return {"inputs": draw(step, BATCH, WIDTH), "labels": integers(step, 3, BATCH)}


def config_of(plan: Plan, **train: Any) -> dict[str, Any]:
    return dict(
        parallel=plan.parallel,
        schedule=plan.schedule,
        optimizer=dict(type="SGD", lr=LR),
        train=dict(global_batch_size=BATCH, precision="fp64", seed=3, **train),
        comm=dict(timeout_seconds=20.0),
        device="cpu",
    )


def train(rank: int, plan: Plan) -> dict[str, tuple[Run, list[float]]]:
    """Each case, and what an evaluation of the last batch gives before and after."""
    runs = {}
    for name, (make, loss) in CASES.items():
        engine = colossus.initialize(
            config_of(plan, samples_interact=True), model=lambda make=make: make(Kit), loss_fn=loss
        )
        index, count = (getattr(engine.context, name)("data") for name in ("index", "size"))
        batches = [{key: x.chunk(count)[index] for key, x in batch_of(step).items()} for step in range(STEPS)]
        evaluated, losses, gradients = [engine.eval_step(batches[-1]).loss], [], []
        start = full_state_dict(engine.model, engine.context)
        for batch in batches:
            losses.append(engine.train_step(batch).loss)
            gradients.append(full_state_dict(engine.model, engine.context, gradients=True))
        evaluated.append(engine.eval_step(batches[-1]).loss)
        runs[name] = Run(losses, gradients, start, full_state_dict(engine.model, engine.context)), evaluated
        engine.close()
    return runs


@cache
def plainly(num_microbatches: int) -> dict[str, tuple[Run, list[float]]]:
    """Plain torch, whose microbatches have every so many-th sample; outside of an engine the functions are plain."""
    started = run_ranks(1, train, Plan(1, {}, {}), with_context=False)[0]
    runs = {}
    for name, (make, loss) in CASES.items():
        start = started[name][0].start
        net = make(PlainKit).double()
        net.load_state_dict(start)
        optimizer = torch.optim.SGD(net.parameters(), lr=LR)
        losses, gradients = [], []

        def evaluated(net: nn.Module = net, loss: Any = loss) -> float:
            total, count = loss(net(batch_of(STEPS - 1)["inputs"]), batch_of(STEPS - 1))
            return float(total.detach() / count)

        before = evaluated()
        for step in range(STEPS):
            parts = [
                {key: x[m::num_microbatches] for key, x in batch_of(step).items()} for m in range(num_microbatches)
            ]
            optimizer.zero_grad()
            totals = [loss(net(part["inputs"]), part) for part in parts]
            mean = sum(total for total, _ in totals) / sum(count for _, count in totals)
            mean.backward()
            losses.append(float(mean.detach()))
            gradients.append({key: param.grad.clone() for key, param in net.named_parameters()})
            optimizer.step()
        end = {key: x.detach().clone() for key, x in net.state_dict().items()}
        runs[name] = Run(losses, gradients, start, end), [before, evaluated()]
    return runs


@pytest.mark.parametrize("plan", [*SOME, *long(*(name for name in PLANS if name not in SOME))])
def test_samples_that_look_at_each_other(plan: str) -> None:
    wanted = plainly(PLANS[plan].schedule.get("microbatches", 1))
    for runs in run_ranks(PLANS[plan].world, train, PLANS[plan], with_context=False):
        for name, (run, evaluated) in runs.items():
            assert difference(run, wanted[name][0]) == "", name
            assert evaluated == pytest.approx(wanted[name][1], rel=1e-10), name


# -- the functions alone ----------------------------------------------------------------------------------------


def test_outside_of_parallelism_they_are_plain() -> None:
    x = draw(0, 4, 3)
    assert gather_samples(x) is x
    assert torch.equal(mean_over_samples(x), x.mean(0))


def test_order_gradient_and_bytes() -> None:
    """Along data x tensor axes the samples come in the order of one process; each rank's part of a gradient counts."""
    size = 3
    whole, weights = draw(0, 8, size), [draw(rank + 1, 8, size) for rank in range(8)]

    def body(context: ParallelContext) -> Any:
        ways = context.size(("data", "row"))
        x = whole.chunk(ways)[context.index(("data", "row"))].clone().requires_grad_()
        with context, accounting.count() as count:
            out = gather_samples(x)
            (out * weights[context.rank]).sum().backward()
            sent = count.bytes()
            flags = gather_samples(x.detach() > 0)
        with context, accounting.count() as of_mean:
            mean = mean_over_samples(x)
        return context.rank, context.coordinates, out.detach(), flags, x.grad, sent, mean.detach(), of_mean.bytes()

    ranks = run_ranks(8, body, plan=grid_of(dict(row=2, col=2), data=2), mode="2d")
    for rank, at, out, flags, grad, sent, mean, of_mean in ranks:
        assert torch.equal(out, whole)
        assert torch.equal(flags, whole > 0)
        together = [other for other, place, *_ in ranks if place["col"] == at["col"]]
        total = torch.stack([weights[other] for other in together]).sum(0)
        index = at["data"] * 2 + at["row"]
        torch.testing.assert_close(grad, total.chunk(4)[index], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(mean, whole.mean(0), rtol=1e-12, atol=1e-12)
        own = 2 * size * 8
        assert (sent, of_mean) == (2 * 3 * own, 2 * 3 / 4 * size * 8), rank


class OfTokens(nn.Module):
    """Its statistics are of a token of all samples, and it looks at whole sequences of all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).tanh()
        x = x - mean_over_samples(x)
        return x + gather_samples(x).cumsum(1).square().mean((0, 1))


@pytest.mark.parametrize("parallel", [dict(sequence=2, data=2), *long(dict(sequence=4), dict(
    sequence=dict(size=2, mode="ring"), tensor=dict(mode="2d", size=4)))], ids=str)  # fmt: skip
def test_tokens_that_ranks_split_come_together(parallel: dict[str, Any]) -> None:
    """In the order of the sequence and without padding."""
    x = draw(0, 4, 7, WIDTH)

    def loss(out: Tensor, batch: Any) -> tuple[Tensor, int]:
        every = gather_samples(out).cumsum(1).square().mean(1)
        return (every @ every.T).logsumexp(-1).mean() * len(batch), len(batch)

    def body(rank: int, parallel: dict[str, Any]) -> Any:
        section = parallel.get("sequence")
        padded = {} if section is None else {"sequence": dict(size=2, pad=True) | (
            section if isinstance(section, dict) else dict(size=section))}  # fmt: skip
        config = config_of(Plan(1, parallel | padded, {}), samples_interact=True)
        config["train"]["global_batch_size"] = len(x)
        engine = colossus.initialize(config, model=OfTokens, loss_fn=loss)
        start = full_state_dict(engine.model, engine.context)
        index, count = (getattr(engine.context, name)("data") for name in ("index", "size"))
        result = engine.train_step(x.chunk(count)[index]).loss
        gradients = full_state_dict(engine.model, engine.context, gradients=True)
        return Run([result], [gradients], start, full_state_dict(engine.model, engine.context))

    ranks = run_ranks(8 if "tensor" in parallel else 4, body, parallel, with_context=False)
    net = OfTokens().double()
    net.load_state_dict(ranks[0].start)
    total, count = loss(net(x), x)
    (total / count).backward()
    gradients = {name: param.grad for name, param in net.named_parameters()}
    torch.optim.SGD(net.parameters(), lr=LR).step()
    plain = Run([float(total.detach() / count)], [gradients], ranks[0].start, net.state_dict())
    for run in ranks:
        assert difference(run, plain) == ""


# -- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [1, 2])
def test_an_engine_is_told_that_samples_interact(data: int) -> None:
    def body(rank: int) -> str:
        config = config_of(Plan(data, dict(data=data), {}))
        engine = colossus.initialize(config, model=lambda: Chain(Kit), loss_fn=clip)
        with pytest.raises(ValueError, match="but the samples of a microbatch") as error:
            engine.train_step({key: x[: BATCH // data] for key, x in batch_of(0).items()})
        return str(error.value)

    for words in run_ranks(data, body, with_context=False):
        assert words.startswith("gather_samples combines samples")
        assert "set train.samples_interact=True" in words
        assert "test_samples.py" in words


def test_data_ranks_have_as_many_samples() -> None:
    def body(rank: int) -> list[str]:
        config = config_of(Plan(2, dict(data=2), {}), samples_interact=True)
        engine = colossus.initialize(config, model=lambda: Chain(Kit), loss_fn=clip)
        messages = []
        batch = {key: x[: 2 + rank] for key, x in batch_of(0).items()}
        for call in (engine.train_step, engine.eval_step):
            with pytest.raises(ValueError, match=r"train\.samples_interact") as error:
                call(batch)
            messages.append(str(error.value))
        return messages

    for rank, (trained, evaluated) in enumerate(run_ranks(2, body, with_context=False)):
        assert f"takes 8 samples = data 2 x 4, but this data rank's batch has {2 + rank}" in trained
        assert (
            "an evaluation needs as many samples on each data rank, which divide by 1, but a batch has [2, 3]"
            in evaluated
        )


# -- docs/other-samples.md --------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "other-samples.md"


def run_page(rank: int, parallel: str) -> tuple[list[float], dict[str, Tensor]]:
    text = "".join(re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    assert "parallel=dict(data=1)," in text
    values: dict[str, Any] = {}
    exec(text.replace("parallel=dict(data=1),", f"parallel={parallel},"), values)
    engine = values["engine"]
    return values["losses"], full_state_dict(engine.model, engine.context)


@cache
def clip_in_plain_torch() -> tuple[list[float], dict[str, Tensor]]:
    """The page's model and loss without an engine, from the values that one process of ours starts with."""
    text = "".join(re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    values: dict[str, Any] = {}
    exec(text.partition("losses = ")[0], values)
    net, batch = values["Contrastive"]().double(), values["batch"]
    net.load_state_dict(full_state_dict(values["engine"].model, values["engine"].context))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    inputs, losses = batch["inputs"], []
    for _ in range(3):
        optimizer.zero_grad()
        loss = net.clip(inputs["input_ids"], inputs["pixel_values"].double(), return_loss=True).loss
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    return losses, net.state_dict()


@pytest.mark.parametrize("parallel", ["dict(data=2)", *long("dict(tensor=2)", "dict(data=2, zero=3)",
                                                            "dict(tensor=dict(mode='2d', size=4))")])  # fmt: skip
def test_clip_of_the_page_is_transformers_own(parallel: str) -> None:
    losses, end = clip_in_plain_torch()
    for own_losses, weights in run_ranks(4 if "2d" in parallel else 2, run_page, parallel, with_context=False):
        assert own_losses == pytest.approx(losses, rel=1e-10)
        for name, value in end.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-10, atol=1e-10, msg=name)
