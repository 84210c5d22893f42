"""Checkpoints of a model on the device: saved from page-locked memory while training goes on, and loaded back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.device_ranks import DeviceRanks
from helpers.training import batch_of, config_of

import colossus
from colossus.engine.engine import Engine
from colossus.state.model_state_dict import full_state_dict

MODEL: dict[str, Any] = dict(num_layers=2, hidden_size=64, num_heads=4, vocab_size=53, seq_len=16, dropout=0.1)
BEFORE, AFTER = 3, 3
#: world size, plan, precision
RUNS: dict[str, tuple[int, dict[str, Any], Any]] = {
    "fp32": (1, {}, "fp32"),
    "bf16": (1, {}, "bf16"),
    "fp16": (1, {}, "fp16"),
    "all in bf16": (1, {}, dict(params="bf16", compute="bf16", reduce="bf16", optimizer="bf16")),
    "data 2, zero 3": (2, dict(data=2, zero=3), "fp32"),
    "tensor 2": (2, dict(tensor=2), "bf16"),
    "pipeline 2": (2, dict(pipeline=2), "fp32"),
}


def make_config(ranks: DeviceRanks, world: int, plan: dict[str, Any], precision: Any, folder: Path) -> dict[str, Any]:
    return config_of(
        plan, 100, precision, model=MODEL, checkpoint=dict(dir=str(folder)), device=ranks.device.type,
        schedule=dict(microbatches=2), comm=ranks.comm(world),
    )  # fmt: skip


def run_step(engine: Engine, step: int) -> float:
    sizes = engine.config.model.spec()
    count, index = engine.context.size("data"), engine.context.index("data")
    batch = {key: value.chunk(count)[index] for key, value in batch_of(step, sizes).items()}
    return engine.train_step({key: value.to(engine.device) for key, value in batch.items()}).loss


def weights_of(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().clone() for name, value in full_state_dict(engine.model, engine.context).items()}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on_to_the_bit(
    ranks: DeviceRanks, figures: Callable[[Any], None], tmp_path: Path, name: str
) -> None:
    world, plan, precision = RUNS[name]
    stalls = ranks.run(world, save_and_resume, make_config(ranks, world, plan, precision, tmp_path))
    figures({"stall ms": 1000 * max(stalls)})


def save_and_resume(rank: int, device: torch.device, config: dict[str, Any]) -> float:
    """Return the seconds that the save took from training."""
    engine = colossus.initialize(config)
    for step in range(BEFORE):
        run_step(engine, step)
    saved = weights_of(engine)
    if device.type == "cuda":
        torch.cuda._sleep(50_000_000)  # what was computed is not there yet when the copy is asked for
    save = engine.checkpoints.save(background=True)
    stall = engine.checkpoints.stall_seconds
    expected = [run_step(engine, step) for step in range(BEFORE, BEFORE + AFTER)]
    save.wait()
    end = weights_of(engine)
    if device.type == "cuda":
        store: Any = engine.checkpoints._saver._disk
        assert store._staging._memory.is_pinned(), "the copy that is written is not in page-locked memory"
    engine.close()

    again = colossus.initialize(config)
    again.checkpoints.load(config["checkpoint"]["dir"])
    require_same(weights_of(again), saved, "after the load")
    losses = [run_step(again, step) for step in range(BEFORE, BEFORE + AFTER)]
    assert losses == expected, f"losses are {losses}, those of the run that was saved {expected}"
    require_same(weights_of(again), end, f"{AFTER} steps after the load")
    again.close()
    return stall


def require_same(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], when: str) -> None:
    assert weights.keys() == expected.keys()
    differing = [name for name, value in expected.items() if not torch.equal(weights[name], value)]
    assert not differing, f"{when} {len(differing)} of {len(expected)} weights are others, among them {differing[:3]}"


def test_two_ranks_then_one_on_the_cpu(ranks: DeviceRanks, host_ranks: DeviceRanks, tmp_path: Path) -> None:
    saved = ranks.run(2, save, make_config(ranks, 2, dict(data=2, zero=2), "fp32", tmp_path))[0]
    loaded = host_ranks.run_one(load, make_config(host_ranks, 1, {}, "fp32", tmp_path))
    assert loaded == saved, "the sums of the weights differ"


def sums_of(engine: Engine) -> dict[str, float]:
    return {name: value.double().sum().item() for name, value in weights_of(engine).items()}


def save(rank: int, device: torch.device, config: dict[str, Any]) -> dict[str, float]:
    engine = colossus.initialize(config)
    run_step(engine, 0)
    sums = sums_of(engine)
    engine.checkpoints.save(background=True).wait()
    engine.close()
    return sums


def load(rank: int, device: torch.device, config: dict[str, Any]) -> dict[str, float]:
    engine = colossus.initialize(config)
    engine.checkpoints.load(config["checkpoint"]["dir"])
    sums = sums_of(engine)
    engine.close()
    return sums
