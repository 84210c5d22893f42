"""Clipping by value, norms by parameter group, and what is written of them."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.faulty_gradients import Faulty
from helpers.ranks import run_ranks
from helpers.training import BATCH, batch_of, config_of, is_key_bias, shared_run
from torch import Tensor, nn

import colossus
from colossus.checkpoint.state_dict import full_state_dict
from colossus.monitor.display import PlainDisplay
from colossus.monitor.metrics import Metrics

STEPS, NORM, VALUE = 3, 0.5, 0.004
EMBEDDINGS = ("embedding", "positions")


def grouped(params: Iterable[nn.Parameter], lr: float, *, named: bool) -> torch.optim.Optimizer:
    """Matrices, vectors and embeddings; with names, without the groups that a stage has no parameter of."""
    kinds: dict[str, list[nn.Parameter]] = {"embeddings": [], "matrices": [], "vectors": []}
    for param in params:
        name = param._colossus_spec.name  # type: ignore[attr-defined]
        kind = "embeddings" if name.startswith(EMBEDDINGS) else "matrices" if param.dim() > 1 else "vectors"
        kinds[kind].append(param)
    if named:
        groups: list[dict[str, Any]] = [{"params": held, "name": kind} for kind, held in kinds.items() if held]
    else:
        groups = [{"params": held} for held in kinds.values()]
    return torch.optim.SGD(groups, lr=lr)


def by_name(params: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return grouped(params, lr, named=True)


def by_number(params: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return grouped(params, lr, named=False)


def settings(parallel: dict[str, Any], kind: str = "1f1b", optimizer: Any = "SGD", **train: Any) -> dict[str, Any]:
    config = config_of(
        parallel,
        STEPS,
        "fp64",
        schedule=dict(type=kind, microbatches=2 if "pipeline" in parallel else 1),
        train=dict(clip_grad_norm=NORM, **train),
        lr_schedule=dict(type="constant", warmup_steps=0),
    )
    return {**config, "optimizer": dict(type=optimizer, lr=0.5)}


PLANS: dict[str, tuple[int, dict[str, Any], str]] = {
    "data": (2, dict(data=2), "1f1b"),
    "1d": (2, dict(tensor=dict(size=2)), "1f1b"),
    "2d": (4, dict(tensor=dict(mode="2d", size=4)), "1f1b"),
    "1f1b": (4, dict(data=2, pipeline=2), "1f1b"),
    "zb-v": (2, dict(pipeline=2), "zb-v"),
    "zero": (4, dict(data=2, pipeline=2, zero=3), "1f1b"),
}
plans = pytest.mark.parametrize("plan", [*PLANS.values()], ids=[*PLANS])


@cache
def plain_run() -> tuple[dict[str, Tensor], list[dict[str, float]], int]:
    """Plain torch in one process: weights at the end, norms of the groups in each step, elements that were clipped."""
    engine = colossus.initialize(settings({}))
    model = copy.deepcopy(engine.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    norms, num_clipped = [], 0
    for step in range(STEPS):
        batch = batch_of(step)
        optimizer.zero_grad()
        logits, labels = model(batch["inputs"]).flatten(0, 1), batch["labels"].flatten()
        F.cross_entropy(logits, labels, ignore_index=-100).backward()
        squares = {"embeddings": 0.0, "matrices": 0.0, "vectors": 0.0}
        for name, param in model.named_parameters():
            kind = "embeddings" if name.startswith(EMBEDDINGS) else "matrices" if param.dim() > 1 else "vectors"
            squares[kind] += param.grad.square().sum().item()  # type: ignore[union-attr]
        norms.append({kind: square**0.5 for kind, square in squares.items()})
        nn.utils.clip_grad_norm_(model.parameters(), NORM)
        num_clipped += sum(int((param.grad.abs() > VALUE).sum()) for param in model.parameters())  # type: ignore[union-attr]
        nn.utils.clip_grad_value_(model.parameters(), VALUE)
        optimizer.step()
    return full_state_dict(model, engine.context), norms, num_clipped


@pytest.mark.rest("1f1b", "2d", "zero")
@plans
def test_clipping_by_norm_then_by_value(plan: tuple[int, dict[str, Any], str]) -> None:
    world, parallel, kind = plan
    trace = shared_run(world, settings(parallel, kind, clip_grad_value=VALUE), STEPS)[0]
    weights, _, num_clipped = plain_run()
    assert num_clipped > 1000
    for name, value in weights.items():
        if not is_key_bias(name):
            torch.testing.assert_close(trace.end[name], value, rtol=1e-9, atol=1e-12, msg=name)


def _norms_of_groups(rank: int, config: dict[str, Any]) -> list[dict[str, float]]:
    engine = colossus.initialize(config)
    index, count = engine.context.index("data"), engine.context.size("data")
    part = BATCH // count
    found = []
    for step in range(STEPS):
        batch = {key: value[index * part :][:part] for key, value in batch_of(step).items()}
        result = engine.train_step(batch)
        found.append(result.grad_norms)
        assert sum(norm**2 for norm in result.grad_norms.values()) == pytest.approx(result.grad_norm**2, rel=1e-12)
    engine.close()
    return found


@pytest.mark.rest("1f1b, by_name", "data, by_name", "zero, by_name", "1f1b, by_number")
@pytest.mark.parametrize(
    ("plan", "optimizer"),
    [
        pytest.param(
            plan,
            optimizer,
            id=f"{name}, {optimizer.__name__}",
            marks=[pytest.mark.long] if optimizer is by_number and name != "1f1b" else [],
        )
        for name, plan in PLANS.items()
        for optimizer in (by_name, by_number)
    ],
)
def test_norms_of_parameter_groups(plan: tuple[int, dict[str, Any], str], optimizer: Any) -> None:
    """Before clipping. A stage may lack a group, or have it without parameters."""
    world, parallel, kind = plan
    config = settings(parallel, kind, optimizer, grad_norm_by_group=True, clip_grad_value=VALUE)
    traces = run_ranks(world, _norms_of_groups, config, with_context=False)
    _, wanted, _ = plain_run()
    if optimizer is by_number:
        wanted = [{str(number): norm for number, norm in enumerate(norms.values())} for norms in wanted]
    for found in traces:
        assert [norms.keys() for norms in found] == [norms.keys() for norms in wanted]
        for norms, expected in zip(found, wanted, strict=True):
            assert norms == pytest.approx(expected, rel=1e-9)


def test_rows_and_lines(tmp_path: Path) -> None:
    faulty = Faulty(settings({}, on_nonfinite="skip", grad_norm_by_group=True))
    engine = faulty.engine
    path, stream = tmp_path / "metrics.jsonl", io.StringIO()
    hooks = [Metrics(path), PlainDisplay(tmp_path, stream)]
    for hook in hooks:
        hook.on_train_start(engine)
    for step in range(STEPS):
        for hook in hooks:
            hook.on_step_start(engine)
        result = faulty.step(step, [(0, "norm.bias")] if step == 1 else ())
        for hook in hooks:
            hook.on_step_end(engine, result)
    for hook in hooks:
        hook.on_train_end(engine)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["skipped"] for row in rows] == [0, 1, 1]
    assert rows[0]["grad_norms"] == {"0": pytest.approx(rows[0]["grad_norm"], rel=1e-12)}
    assert rows[1]["grad_norm"] != rows[1]["grad_norm"]  # NaN
    assert "loss_scale" not in rows[0]
    lines = stream.getvalue().splitlines()
    assert ["skipped 1" in line for line in lines[1:3]] == [False, True]
    assert ", 1 skipped; run folder" in lines[3]
