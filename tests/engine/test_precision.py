"""``train.precision``: what is computed, what travels and what is summed, in bfloat16 and float16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.laws import BOUNDS, outside
from helpers.ranks import run_ranks
from helpers.training import batch_of, config_of, run_plan, shared_run
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.comm import accounting
from colossus.layout.parameter import spec_of
from colossus.state.model_state_dict import full_state_dict

STEPS = 3
#: ranks, parallel, schedule
PLANS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "data": (2, dict(data=2), {}),
    "1d": (2, dict(tensor=dict(size=2, sequence_sharded=True)), {}),
    "2d": (4, dict(tensor=dict(mode="2d", size=4)), {}),
    "2d step": (4, dict(tensor=dict(mode="2d", size=4, weights="step")), dict(microbatches=2)),
    "2.5d": (8, dict(tensor=dict(mode="2.5d", size=8)), {}),
    "3d": (4, dict(tensor=dict(mode="3d", shape=(2, 1, 2))), {}),
    "sequence": (2, dict(sequence=dict(size=2, mode="ring")), {}),
    "1f1b": (2, dict(pipeline=2), dict(type="1f1b", microbatches=2)),
    "zb-h1": (2, dict(pipeline=2), dict(type="zb-h1", microbatches=2)),
    "data x 1d": (4, dict(data=2, tensor=2), {}),
    "zero 1": (2, dict(data=2, zero=1), dict(microbatches=2)),
    "zero 2 x 2d": (8, dict(data=2, zero=2, tensor=dict(mode="2d", size=4)), {}),
    "zero 3": (2, dict(data=2, zero=3), dict(microbatches=2)),
    "zero 3 x zb-v": (4, dict(data=2, zero=3, pipeline=2), dict(type="zb-v", microbatches=2)),
}
LONG = ("zero 1", "zero 2 x 2d", "zero 3 x zb-v", "2d step", "2.5d", "1f1b", "data x 1d")


def settings(precision: Any, parallel: dict[str, Any], schedule: dict[str, Any], **train: Any) -> dict[str, Any]:
    config = config_of(parallel, STEPS, precision, schedule=schedule, lr_schedule=dict(type="constant", warmup_steps=0))
    config["optimizer"] = dict(type="SGD", lr=0.3)
    config["model"] |= dict(positions="rotary", norm="rmsnorm", mlp="swiglu") if schedule.get("type") == "zb-h1" else {}
    config["train"] |= train
    return config


def in_every_plan() -> Iterator[Any]:
    for precision in BOUNDS:
        for plan in PLANS:
            is_long = plan in LONG or (precision == "fp16" and plan != "data") or plan == "2d"
            yield pytest.param(precision, plan, marks=pytest.mark.long if is_long else ())


@pytest.mark.rest("bf16-data", "bf16-1d", "bf16-zb-h1", "bf16-3d", "bf16-sequence", "bf16-zero 3")
@pytest.mark.parametrize(("precision", "plan"), list(in_every_plan()))
def test_plans_follow_one_process_of_the_same_precision(precision: str, plan: str) -> None:
    world, parallel, schedule = PLANS[plan]
    config = settings(precision, parallel, schedule)
    (alone,) = shared_run(1, {**config, "parallel": {}}, STEPS)
    for trace in run_plan(world, config, STEPS):
        assert outside(trace, alone, precision) == []
        assert {value.dtype for value in (*trace.end.values(), *trace.gradients[0].values())} == {torch.float32}


# -- plain torch ----------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """Plain torch, and nothing of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(53, 16), nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.up, self.down = nn.Linear(16, 40), nn.Linear(40, 53)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return self.down(F.gelu(self.up(x)))

    def loss(self, logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        labels = batch["labels"].flatten()
        return F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum"), (labels != -100).sum()


# -- narrow parameters ----------------------------------------------------------------------------------------

NARROW = dict(params="bf16")


def _as_torch_does(rank: int, precision: Any) -> tuple[list[float], list[float], list[str]]:
    """Losses of ours and of torch's autocast; the names of weights that differ."""
    config = settings(precision, {}, {})
    del config["model"]
    config["train"]["clip_grad_norm"] = None
    engine = colossus.initialize(config, model=Plain)
    start = full_state_dict(engine.model, engine.context)
    twin = Plain()
    if precision == NARROW:
        twin.bfloat16().norm.float()
    twin.load_state_dict(start)
    copies = {name: value.float().clone().requires_grad_() for name, value in start.items()}
    optimizer = torch.optim.SGD(copies.values(), lr=0.3)
    mine, wanted = [], []
    for step in range(STEPS):
        batch = batch_of(step)
        mine.append(engine.train_step(batch).loss)
        with torch.autocast("cpu", torch.bfloat16):
            total, count = twin.loss(twin(batch["inputs"]), batch)
        total.backward()
        with torch.no_grad():
            for name, param in twin.named_parameters():
                assert param.grad is not None
                copies[name].grad = param.grad.float().mul_((1.0 / count.double()).float())
            optimizer.step()
            for name, param in twin.named_parameters():
                param.copy_(copies[name])
        twin.zero_grad()
        wanted.append((total.double() / count).item())
    stored = full_state_dict(engine.model, engine.context)
    problems = [f"{name} is stored in {value.dtype}" for name, value in stored.items() if value.dtype != torch.float32]
    return mine, wanted, problems + [name for name, value in copies.items() if not torch.equal(stored[name], value)]


@pytest.mark.parametrize("precision", ["bf16", NARROW], ids=["bf16", "narrow"])
def test_a_plain_model_is_that_of_torch_autocast(precision: Any) -> None:
    """Narrow parameters are copies of what the optimizer updates."""
    ((mine, wanted, problems),) = run_ranks(1, _as_torch_does, precision, with_context=False)
    assert mine == wanted
    assert problems == []


@pytest.mark.rest("zero 3 x 1d")
@pytest.mark.parametrize(
    ("world", "parallel", "schedule"),
    [
        (2, dict(data=2), dict(microbatches=2)),
        (4, dict(data=2, zero=3, tensor=2), {}),
        pytest.param(2, dict(data=2, zero=1), {}, marks=pytest.mark.long),
        pytest.param(4, dict(tensor=dict(mode="2d", size=4)), {}, marks=pytest.mark.long),
        (2, dict(pipeline=2), dict(type="zb-h1", microbatches=2)),
    ],
    ids=["data", "zero 3 x 1d", "zero 1", "2d", "zb-h1"],
)
def test_narrow_parameters_under_every_plan(world: int, parallel: dict[str, Any], schedule: dict[str, Any]) -> None:
    config = settings(NARROW, parallel, schedule)
    (alone,) = shared_run(1, {**config, "parallel": {}}, STEPS)
    for trace in run_plan(world, config, STEPS):
        assert outside(trace, alone, "bf16") == []
        assert {value.dtype for value in (*trace.end.values(), *trace.gradients[0].values())} == {torch.float32}


class Regression(nn.Module):
    """Norms, one of them on what the batch has, a scalar, a table that is no parameter, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm, self.linear, self.norm = nn.BatchNorm1d(4), nn.Linear(4, 8), layers.LayerNorm(8)
        self.groups, self.out, self.scale = nn.GroupNorm(2, 8), nn.Linear(8, 1), nn.Parameter(torch.tensor(0.07))
        nn.init.normal_(self.batch_norm.weight, 1.0, 0.1)
        self.register_buffer("table", torch.tensor([1001.3]))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.groups(self.norm(self.linear(self.batch_norm(x))))).float() * self.scale + self.table


X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)) + 100.0
Y = torch.tensor([[1001.3], [70001.0], [0.1], [-3.0]])


def _not_rounded(rank: int, precision: Any, parallel: dict[str, Any]) -> Any:
    """Targets as the loss sees them, state at the start and the end, and of each parameter the dtypes of what compute
    sees, of what is stored, and of its gradient."""
    targets: list[float] = []

    def loss(out: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        targets.extend(batch[1].flatten().tolist())
        return (out - batch[1]).square().sum(), len(out)

    config = dict(
        parallel=parallel,
        train=dict(global_batch_size=4, precision=precision),
        optimizer=dict(type="SGD", lr=1e-9),
        lr_schedule=dict(type="constant", warmup_steps=0),
        device="cpu",
    )
    engine = colossus.initialize(config, model=Regression, loss_fn=loss)
    start = {name: value.clone() for name, value in full_state_dict(engine.model, engine.context).items()}
    part = slice(2 * rank, 2 * rank + 2) if parallel else slice(None)
    engine.train_step((X[part], Y[part]))
    dtypes = {}
    computed = {stored: param for param, stored in engine.store._stored_as.items()}
    for stored in engine.store.parameters():
        param = computed.get(stored, stored)
        assert stored.grad is not None or not stored.numel()
        dtypes[spec_of(param).name] = {
            param.dtype,
            stored.dtype,
            torch.float32 if stored.grad is None else stored.grad.dtype,
        }
    end = full_state_dict(engine.model, engine.context)
    engine.close()
    return targets, start, end, dtypes


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_what_is_not_trained_is_not_rounded_to_narrow_parameters(precision: str) -> None:
    targets, start, end, dtypes = _not_rounded(0, dict(params=precision), {})
    _, wide, *_ = _not_rounded(0, "fp32", {})
    assert targets == Y.flatten().tolist()
    low = dict(bf16=torch.bfloat16, fp16=torch.float16)[precision]
    for name, value in wide.items():
        is_rounded = name.partition(".")[0] in ("linear", "out")
        assert torch.equal(start[name], value.to(low).float() if is_rounded else value), name
        assert name not in dtypes or dtypes[name] == ({low, torch.float32} if is_rounded else {torch.float32}), name
    assert start["scale"].item() == pytest.approx(0.07, rel=1e-7)
    twin = nn.BatchNorm1d(4)
    twin(X)
    for name in ("running_mean", "running_var"):
        assert torch.equal(end[f"batch_norm.{name}"], getattr(twin, name))
    assert torch.equal(end["table"], torch.tensor([1001.3]))


# -- what travels ---------------------------------------------------------------------------------------------

Counted = dict[tuple[str, str, torch.dtype], float]


def _count(rank: int, config: dict[str, Any]) -> Counted:
    engine = colossus.initialize(config)
    size, index = engine.context.size("data"), engine.context.index("data")
    batch = {key: value[index * 8 // size : (index + 1) * 8 // size] for key, value in batch_of(0).items()}
    engine.train_step(batch)
    with accounting.count() as moved:
        engine.train_step(batch)
    engine.close()
    return {key: tally.bytes for key, tally in moved.entries.items()}


def bytes_of(counted: Counted, operation: str, axes: str, dtype: torch.dtype | None = None) -> float:
    return sum(sent for key, sent in counted.items() if key[:2] == (operation, axes) and dtype in (None, key[2]))


def test_weights_travel_in_half_the_bytes() -> None:
    """On the axis on which nothing but weights is gathered, and their gradients are reduce-scattered."""
    plan = dict(tensor=dict(mode="3d", shape=(2, 1, 2)))
    configs = [settings(precision, plan, {}) for precision in ("fp32", "bf16", dict(compute="bf16", reduce="bf16"))]
    wide, narrow, reduced = run_ranks(
        4, lambda rank: [_count(rank, precision) for precision in configs], with_context=False
    )[0]
    assert bytes_of(narrow, "all_gather", "i") == bytes_of(wide, "all_gather", "i") / 2 > 0
    assert bytes_of(narrow, "all_gather", "i", torch.float32) == 0
    assert bytes_of(narrow, "reduce_scatter", "i") == bytes_of(wide, "reduce_scatter", "i") > 0
    assert bytes_of(reduced, "reduce_scatter", "i") == bytes_of(wide, "reduce_scatter", "i") / 2


def test_gradients_are_summed_in_what_is_asked_for() -> None:
    sizes = []
    for reduce in ("fp32", "bf16"):
        counted = run_ranks(
            2, _count, settings(dict(compute="bf16", reduce=reduce), dict(data=2), {}), with_context=False
        )[0]
        dtype = dict(fp32=torch.float32, bf16=torch.bfloat16)[reduce]
        sizes.append(bytes_of(counted, "all_reduce", "data", dtype))
        assert sum(sent for key, sent in counted.items() if key[2] not in (dtype, torch.float64)) == 0
    assert sizes[1] == sizes[0] / 2 > 0
    (alone,) = shared_run(1, settings("bf16", {}, {}), STEPS)
    for trace in run_plan(2, settings(dict(compute="bf16", reduce="bf16"), dict(data=2), {}), STEPS):
        assert outside(trace, alone, "bf16") == []
