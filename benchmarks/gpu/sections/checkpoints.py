"""Checkpoints of a model on the device: saved from page-locked memory while training goes on, and loaded back."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from helpers.training import batch_of, config_of

import colossus
from benchmarks.gpu.ranks import RankPool
from benchmarks.gpu.section import Case, Figures
from benchmarks.undrawn import fill, undrawn
from colossus.checkpoint.state_dict import full_state_dict
from colossus.engine.engine import Engine

MODEL: dict[str, Any] = dict(num_layers=2, hidden_size=64, num_heads=4, vocab_size=53, seq_len=16, dropout=0.1)
LARGE: dict[str, Any] = dict(num_layers=6, hidden_size=1024, num_heads=8, vocab_size=2048, seq_len=16)
#: bytes of two checkpoints of it, and as much again
TWO_SAVES = 4 << 30
BEFORE, AFTER = 3, 3

#: name -> (ranks, plan, precision)
RUNS: dict[str, tuple[int, dict[str, Any], Any]] = {
    "fp32": (1, {}, "fp32"),
    "bf16": (1, {}, "bf16"),
    "fp16": (1, {}, "fp16"),
    "all in bf16": (1, {}, dict(params="bf16", compute="bf16", reduce="bf16", optimizer="bf16")),
    "data 2, zero 3": (2, dict(data=2, zero=3), "fp32"),
    "tensor 2": (2, dict(tensor=2), "bf16"),
    "pipeline 2": (2, dict(pipeline=2), "fp32"),
}


def cases(device: torch.device, budget: float) -> Iterator[Case]:
    pool = RankPool(device)
    if device.type == "cuda":
        yield Case("what a save costs the step", partial(_stall, pool))
    for name, (world, plan, precision) in RUNS.items():
        yield Case(f"{name}: goes on to the bit", partial(_goes_on, pool, world, plan, precision))
    yield Case("two ranks, then one on the CPU", partial(_to_the_cpu, pool))
    pool.close()


def _config(device: torch.device, plan: dict[str, Any], precision: Any, folder: str, **sizes: Any) -> dict[str, Any]:
    return config_of(
        plan, 100, precision, model=sizes or MODEL, checkpoint=dict(dir=folder), device=device.type,
        schedule=dict(microbatches=2), comm=dict(backend="gloo") if device.type == "cuda" else {},
    )  # fmt: skip


def _step(engine: Engine, step: int) -> float:
    sizes = engine.config.model.spec()
    count, index = engine.context.size("data"), engine.context.index("data")
    batch = {key: value.chunk(count)[index] for key, value in batch_of(step, sizes).items()}
    return engine.train_step({key: value.to(engine.device) for key, value in batch.items()}).loss


def _weights(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().clone() for name, value in full_state_dict(engine.model, engine.context).items()}


def _goes_on(pool: RankPool, world: int, plan: dict[str, Any], precision: Any) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        found = pool.run(world, _saved_and_resumed, plan, precision, folder)
    return {"stall ms": 1000 * max(found), "tensors on": "page-locked memory" if pool.device.type == "cuda" else "host"}


def _saved_and_resumed(rank: int, device: torch.device, plan: dict[str, Any], precision: Any, folder: str) -> float:
    """Body of a rank: the seconds that the save took from training."""
    engine = colossus.initialize(_config(device, plan, precision, folder))
    for step in range(BEFORE):
        _step(engine, step)
    saved = _weights(engine)
    if device.type == "cuda":
        torch.cuda._sleep(50_000_000)  # what was computed is not there yet when the copy is asked for
    save = engine.checkpoints.save(background=True)
    stall = engine.checkpoints.stall_seconds
    wanted = [_step(engine, step) for step in range(BEFORE, BEFORE + AFTER)]
    save.wait()
    end = _weights(engine)
    if device.type == "cuda":
        writer: Any = engine.checkpoints._writer
        assert writer._staging._memory.is_pinned(), "the copy that is written is not in page-locked memory"
    engine.close()

    again = colossus.initialize(_config(device, plan, precision, folder))
    again.checkpoints.load(folder)
    _require_same(_weights(again), saved, "after the load")
    losses = [_step(again, step) for step in range(BEFORE, BEFORE + AFTER)]
    assert losses == wanted, f"losses are {losses}, of the run that was saved {wanted}"
    _require_same(_weights(again), end, f"{AFTER} steps after the load")
    again.close()
    return stall


def _require_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], when: str) -> None:
    assert found.keys() == wanted.keys()
    differ = [name for name, value in wanted.items() if not torch.equal(found[name], value)]
    assert not differ, f"{when} {len(differ)} of {len(wanted)} weights are others, among them {differ[:3]}"


def _to_the_cpu(pool: RankPool) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        saved = pool.run(2, _only_saved, folder)[0]
        host = RankPool(torch.device("cpu"))
        try:
            (loaded,) = host.run(1, _only_loaded, folder)
        finally:
            host.close()
    assert loaded == saved, "the checksums of the weights differ"
    return {"weights": len(saved)}


def _sums(engine: Engine) -> dict[str, float]:
    return {name: value.double().sum().item() for name, value in _weights(engine).items()}


def _only_saved(rank: int, device: torch.device, folder: str) -> dict[str, float]:
    engine = colossus.initialize(_config(device, dict(data=2, zero=2), "fp32", folder))
    _step(engine, 0)
    sums = _sums(engine)
    engine.checkpoints.save(background=True).wait()
    engine.close()
    return sums


def _only_loaded(rank: int, device: torch.device, folder: str) -> dict[str, float]:
    engine = colossus.initialize(_config(device, {}, "fp32", folder))
    engine.checkpoints.load(folder)
    sums = _sums(engine)
    engine.close()
    return sums


def _stall(pool: RankPool) -> Figures:
    """Of some hundred million numbers; where memory of the host is a file system with room, that is where they go."""
    has_room = os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > TWO_SAVES
    with tempfile.TemporaryDirectory(dir="/dev/shm" if has_room else None) as folder:
        return {**pool.run(1, _timed, folder)[0], "written to": "memory" if has_room else "a disk"}


def _step_seconds(engine: Engine, step: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    _step(engine, step)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def _timed(rank: int, device: torch.device, folder: str) -> Figures:
    with undrawn():
        engine = colossus.initialize(_config(device, {}, "bf16", folder, **LARGE))
    fill(engine.model)
    for step in range(2):
        _step(engine, step)
    found = []
    for step in range(2):  # the first one reserves the memory
        torch.cuda.synchronize()
        before = engine.checkpoints.stall_seconds
        save = engine.checkpoints.save(background=True)
        found.append(engine.checkpoints.stall_seconds - before)
        begin = time.perf_counter()
        while_saved = _step_seconds(engine, 2 + step)
        save.wait()
        writing = time.perf_counter() - begin
    alone = median(_step_seconds(engine, 4 + step) for step in range(5))
    engine.close()
    num_bytes = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file()) / 2
    return {
        "GB": num_bytes / 1e9,
        "first stall ms": 1000 * found[0],
        "stall ms": 1000 * found[1],
        "copied GB/s": num_bytes / found[1] / 1e9,
        "written in s": writing,
        "step ms": 1000 * alone,
        "step beside writing ms": 1000 * while_saved,
    }
