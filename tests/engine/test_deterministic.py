"""``train.deterministic``: the same bits each time under every plan, what torch refuses then, how it is undone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from torch import Tensor, nn

import colossus
from colossus.engine.engine import Engine
from colossus.layout.split_parameter import as_shards

STEPS = 3


class Lookup(nn.Module):
    """Rows by a tensor of indices: the order in which threads add their gradients is not the same each time."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(7, 33))
        self.scale = nn.Parameter(torch.ones(33))

    def forward(self, batch: Tensor) -> Tensor:
        ids = (batch * 1000).long() % 7
        return (self.table + self.scale)[ids] * batch[..., None].sin()

    def loss(self, outputs: Tensor, batch: Tensor) -> tuple[Tensor, int]:
        return (outputs - 1).square().sum(), len(batch)


class Put(Lookup):
    """Torch has one implementation of this, whose result depends on the order where indices are given twice."""

    def forward(self, batch: Tensor) -> Tensor:
        self.table.data.put_(torch.tensor([1, 1]), torch.tensor([1.0, 2.0]))
        return super().forward(batch)


def engine_of(build: Any = None, wanted: bool = True, **sections: Any) -> Engine:
    """The engine of a model class, or of sections of a config."""
    train = dict(global_batch_size=8, deterministic=wanted)
    return colossus.initialize(dict(device="cpu", optimizer=dict(type="SGD", lr=0.01), train=train) | sections, build)


def train(engine: Engine, batch: Any) -> list[bytes]:
    """The bits of what a few steps compute on this rank."""
    results = [engine.train_step(batch) for _ in range(STEPS)]
    found = [torch.tensor([[each.loss, each.grad_norm] for each in results], dtype=torch.float64)]
    found += [value.detach() for value in engine.model.state_dict().values()]
    with as_shards():
        assert all(value.isfinite().all() for value in found)
        return [value.contiguous().view(torch.uint8).numpy().tobytes() for value in found]


def switches() -> tuple[bool, bool, bool]:
    filled, timed = torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    return torch.are_deterministic_algorithms_enabled(), filled, timed


def of_one_process() -> dict[str, Any]:
    """In a Python of its own: threads that add at once do not survive a fork."""
    torch.set_num_threads(4)
    torch.backends.cudnn.benchmark = True
    before = switches()
    batch = torch.randn(8, 2400, generator=torch.Generator().manual_seed(0))
    runs, during = set(), set()
    for _ in range(5):
        engine = engine_of(Lookup)
        during.add(switches())
        runs.add(tuple(train(engine, batch)))
        engine.close()
        assert switches() == before
    engine = engine_of(Put)
    with pytest.raises(RuntimeError) as error:
        engine.train_step(batch)
    engine.close()
    with pytest.raises(ValueError, match="no parameter to train"):  # in the making
        engine_of(nn.Identity)
    other = engine_of(Put, wanted=False)
    other.train_step(batch)
    other.close()
    assert os.environ.pop("CUBLAS_WORKSPACE_CONFIG") == ":4096:8"
    torch.cuda.is_initialized = lambda: True
    with pytest.raises(ValueError, match="CUBLAS_WORKSPACE_CONFIG=:4096:8 before CUDA is first used"):
        engine_of(Lookup)
    return dict(runs=len(runs), during=sorted(during), notes=error.value.__notes__, is_undone=switches() == before)


def test_the_same_bits_each_time_and_words_for_what_cannot_be() -> None:
    tests = str(Path(__file__).parents[1])
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, *sys.path])}
    ended = subprocess.run([sys.executable, __file__], env=environ, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["runs"] == 1
    assert found["during"] == [[True, False, False]]
    assert any("train.deterministic=False" in note for note in found["notes"])
    assert found["is_undone"]


GPT = dict(type="GPT", num_layers=2, hidden_size=24, num_heads=2, vocab_size=29, seq_len=12, dropout=0.1)
LLAMA = {**GPT, "type": "Llama"}
PLANS: dict[str, dict[str, Any]] = {
    "data": dict(model=GPT, parallel=dict(data=2), comm=dict(bucket_mb=0.01)),
    "zero 3": dict(model=GPT, parallel=dict(data=2, zero=3)),
    "tensor": dict(model=GPT, parallel=dict(tensor=2), optimizer=dict(type="Muon", lr=0.01)),
    "pipeline": dict(model=GPT, parallel=dict(pipeline=2), schedule=dict(type="zb-h1", microbatches=4)),
    "experts": dict(model={**LLAMA, "experts": dict(num=4, top_k=2)}, parallel=dict(data=2, expert=2)),
}


def of_plans(rank: int) -> list[str]:
    """The plans that do not give the same bits twice."""
    ids = torch.randint(29, (8, 13), generator=torch.Generator().manual_seed(1))
    different = []
    for name, plan in PLANS.items():
        runs = []
        for _ in range(2):
            engine = engine_of(**plan)
            torch.utils.deterministic.fill_uninitialized_memory = True  # with NaN: does anything read what is not set?
            size, index = engine.context.size("data"), engine.context.index("data")
            mine = ids.chunk(size)[index]
            runs.append(train(engine, dict(inputs=mine[:, :-1], labels=mine[:, 1:])))
            engine.close()
        if runs[0] != runs[1]:
            different.append(name)
    return different


def test_plans_give_the_same_bits_each_time() -> None:
    assert run_ranks(2, of_plans, with_context=False) == [[], []]


if __name__ == "__main__":
    print(json.dumps(of_one_process()))
