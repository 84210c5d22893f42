"""What saving and loading costs, counted: memory beside the state, bytes written and read, who writes how much."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.long import long
from helpers.ranks import run_ranks
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.checkpoint.folder import name_of
from colossus.checkpoint.manifest import read_manifest
from colossus.layout.split_parameter import local_shape

WIDTH = 1024
NUM_LAYERS = 6
#: of one parameter, and of all
PARAMETER = WIDTH * WIDTH * 4
MODEL = NUM_LAYERS * PARAMETER
#: a block that is read or written through, values, what an allocator keeps: less than a parameter
SLACK = 3 << 20


class Net(nn.Module):
    """Products of alternating splits, so that boxes are rows of some and columns of others."""

    def __init__(self) -> None:
        super().__init__()
        splits = [dict(split="column"), dict(split="row")] * (NUM_LAYERS // 2)
        self.layers = nn.ModuleList(layers.Linear(WIDTH, WIDTH, bias=False, **split) for split in splits)

    def forward(self, x: Tensor) -> Tensor:
        for column, row in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = x + row(column(x))
        return x


def loss(outputs: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return outputs.square().mean(1).sum(), len(outputs)


def engine_of(parallel: dict[str, Any], folder: Path, *, steps: int = 1) -> Any:
    """After a step there is momentum."""
    config = dict(
        parallel=parallel,
        train=dict(steps=9, global_batch_size=4, seed=2),
        optimizer=dict(type="SGD", lr=1e-3, momentum=0.9),
        checkpoint=dict(dir=str(folder)),
        device="cpu",
    )
    engine = colossus.initialize(config, model=Net, loss_fn=loss)
    for _ in range(steps):
        engine.train_step(torch.ones(4 // engine.context.size("data"), WIDTH))
    return engine


def peak_over(work: Any) -> int:
    """Bytes of memory that were held at a time on top of those before."""
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # begin a new high-water mark
    work()
    return status("VmHWM") - before


def status(key: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def state_bytes(engine: Any) -> int:
    """Parameters and momenta of this rank."""
    return sum(2 * local_shape(param).numel() * param.element_size() for param in engine.model.parameters())


def saves(rank: int, parallel: dict[str, Any], folder: Path) -> dict[str, int]:
    engine = engine_of(parallel, folder)
    checkpoints = engine.checkpoints
    sizes = dict(state=state_bytes(engine), synchronous=peak_over(lambda: checkpoints.save(background=False).wait()))
    engine.run.completed_steps += 1
    sizes["background"] = peak_over(lambda: checkpoints.save(background=True).wait())
    sizes["copy"] = checkpoints._saver._disk._staging.num_bytes
    engine.close()
    return sizes


PLANS: dict[str, dict[str, Any]] = {
    "tensor": dict(tensor=2),
    "data": dict(data=2),
    "zero": dict(data=2, zero=3),
    "2d": dict(tensor=dict(mode="2d", size=4)),
}


def num_ranks(plan: str) -> int:
    return 4 if plan == "2d" else 2


Saved = Callable[[str], tuple[Path, list[dict[str, int]]]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Of a plan the folder and what each rank tells."""

    @cache
    def save(plan: str) -> tuple[Path, list[dict[str, int]]]:
        folder = tmp_path_factory.mktemp(plan)
        return folder, run_ranks(num_ranks(plan), saves, PLANS[plan], folder, with_context=False)

    return save


@pytest.mark.parametrize("plan", ["zero", *long("data", "tensor", "2d")])
def test_a_save_needs_a_block_or_its_own_copy(saved: Saved, plan: str) -> None:
    """And each byte is written once: replicas share the work."""
    folder, ranks = saved(plan)
    manifest, world = read_manifest(folder / name_of(2)), num_ranks(plan)
    sizes = [manifest.files[f"rank-{rank:05d}.safetensors"].num_bytes for rank in range(world)]
    assert sum(entry.num_bytes for entry in manifest.tensors.values()) >= 2 * MODEL
    assert 2 * MODEL <= sum(sizes) <= 2 * MODEL + 65536 * world
    assert max(sizes) <= 1.05 * sum(sizes) / world
    for peaks, written in zip(ranks, sizes, strict=True):
        assert peaks["synchronous"] <= SLACK, peaks
        # the copy is what this rank writes: rounded up for each tensor, without the header
        assert written - 65536 <= peaks["copy"] <= written + 65536, (peaks, written)
        assert peaks["background"] <= peaks["copy"] + SLACK, peaks


def loads(rank: int, parallel: dict[str, Any], path: Path) -> dict[str, int]:
    engine = engine_of(parallel, path.parent)
    read, system = [0], os.preadv

    def counted(descriptor: int, buffers: Any, offset: int) -> int:
        count = system(descriptor, buffers, offset)
        read[0] += count
        return count

    os.preadv = counted
    try:
        peak = peak_over(lambda: engine.checkpoints.load(path))
    finally:
        os.preadv = system
    sizes = dict(state=state_bytes(engine), read=read[0], peak=peak)
    engine.close()
    engine = engine_of(parallel, path.parent, steps=0)
    sizes["with momentum"] = peak_over(lambda: engine.checkpoints.load(path))
    engine.close()
    return sizes


@pytest.mark.rest("zero-zero")
@pytest.mark.parametrize(("then", "now"), [("zero", "zero"), ("data", "2d")])
def test_a_load_reads_what_it_needs(saved: Saved, then: str, now: str) -> None:
    """Under the same plan each rank's own bytes. And no more memory than the state itself has."""
    folder, _ = saved(then)
    for sizes in run_ranks(num_ranks(now), loads, PLANS[now], folder / name_of(1), with_context=False):
        assert sizes["peak"] <= SLACK, sizes
        assert sizes["with momentum"] <= sizes["state"] // 2 + SLACK, sizes
        assert sizes["state"] <= sizes["read"]
        assert then != now or sizes["read"] <= sizes["state"] + 65536, sizes
