"""N steps, a checkpoint, and N steps in new processes: the run of 2 N steps bit for bit, under the same plan."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.checkpoints import assert_same_contents, assert_same_values, contents
from helpers.ranks import run_ranks
from helpers.strategies import LocalSteps
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import colossus
from colossus import layers
from colossus.checkpoint.folder import name_of
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.values import decode
from colossus.engine.fit import Hook, fit

HALF = 2
GPT: dict[str, Any] = dict(
    type="GPT", num_layers=2, hidden_size=16, num_heads=4, vocab_size=29, seq_len=8, dropout=0.2, attention_dropout=0.1
)
WIDTH, CLASSES = 6, 5


# -- data -----------------------------------------------------------------------------------------------------


class Tokens(Dataset[Any]):
    """Samples that draw from the generators of a worker, too."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 29, (9,), generator=torch.Generator().manual_seed(index))
        ids[torch.randint(0, 8, ())] = random.randrange(29)
        return {"inputs": ids[:-1], "labels": ids[1:]}


class Vectors(Dataset[Any]):
    def __len__(self) -> int:
        return 28

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"inputs": torch.randn(WIDTH, generator=generator), "labels": torch.tensor(index % CLASSES)}


class Stream(IterableDataset[Any]):
    """Knows no place: it is read up to there."""

    def __iter__(self) -> Iterator[Any]:
        return (Vectors()[index] for index in range(28))


def shuffled() -> Any:
    """A loader of one's own, shuffled by the global generator: seven batches, of which the run takes some."""
    return DataLoader(Vectors(), batch_size=4, shuffle=True, drop_last=True)


# -- models, optimizers and hooks of a user's own -------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.drop = layers.Linear(WIDTH, 12), nn.BatchNorm1d(12), nn.Dropout(0.3)
        self.down = nn.Linear(12, CLASSES)
        self.num_calls = 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"num_calls": self.num_calls}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.num_calls = state["num_calls"]

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return self.down(self.drop(self.norm(self.up(x)).relu())) * (1 + 0.01 * self.num_calls)


def classify(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return nn.functional.cross_entropy(outputs, batch["labels"], reduction="sum"), len(outputs)


def two_groups(named: Any) -> torch.optim.Optimizer:
    named = list(named)
    biases = [param for name, param in named if name.endswith("bias")]
    others = [param for name, param in named if not name.endswith("bias")]
    return torch.optim.AdamW([dict(params=others), dict(params=biases, lr=3e-3, weight_decay=0.0)], lr=1e-2)


class Recorder(Hook):
    """Numbers of each step, and what a user draws around it from the global generators."""

    def __init__(self) -> None:
        self.numbers: list[tuple[float, float]] = []
        self.drawn: list[float] = []
        self.tensor = torch.zeros(2, dtype=torch.bfloat16)
        self.own = 0

    def on_step_start(self, engine: Any) -> None:
        self.drawn += [torch.rand(()).item(), random.random(), np.random.rand()]
        self.tensor += 1

    def on_step_end(self, engine: Any, result: Any) -> None:
        self.numbers.append((result.loss, result.grad_norm))
        self.own += 1

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "numbers": self.numbers, "tensor": self.tensor, "own": self.own} | {
            "by step": {1: (True, None)}
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert state["by step"] == {1: (True, None)}
        self.drawn, self.numbers, self.tensor = state["drawn"], state["numbers"], state["tensor"]
        self.own = state["own"]


class Options(Hook):
    """Changes the options of a group while the run is under way."""

    def on_step_end(self, engine: Any, result: Any) -> None:
        if result.step == 2:
            engine.optimizer.param_groups[1]["weight_decay"] = 0.25
            engine.optimizer.param_groups[0]["lr_scale"] = 0.5


# -- cases ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A run of 2 `HALF` steps."""

    world: int = 1
    parallel: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    data: Any = None
    own: bool = False
    hooks: tuple[Callable[[], Hook], ...] = ()
    is_long: bool = False

    def config(self, folder: Path, resume: str | None, num_steps: int = 2 * HALF) -> dict[str, Any]:
        train = dict(steps=num_steps, schedule_steps=2 * HALF, global_batch_size=4, clip_grad_norm=1.0, seed=5)
        config = dict(
            parallel=self.parallel,
            train=train | self.train,
            lr_schedule=dict(type="cosine", warmup_steps=2),
            checkpoint=dict(every=HALF, dir=str(folder), resume=resume),
            device="cpu",
        )
        if not self.own:
            config |= dict(model=GPT, data=dict(type=Tokens), optimizer=dict(type="AdamW", lr=1e-2, weight_decay=0.1))
        return config | self.more

    @property
    def options(self) -> dict[str, Any]:
        if not self.own:
            return {}
        data = Vectors() if self.data is None else self.data()
        optimizer = {} if "optimizer" in self.more else dict(optimizer=two_groups)
        return dict(model=Net, loss_fn=classify, data=data) | optimizer


PIPELINE, ZB_V = dict(type="1f1b", microbatches=2), dict(type="zb-v", microbatches=2)
FP16 = dict(precision="fp16", loss_scale=dict(init=2.0**24, growth_interval=1))
CASES: dict[str, Case] = {
    "one process": Case(),
    "fp16": Case(train=FP16),
    "bf16 parameters": Case(train=dict(precision=dict(params="bf16"))),
    "accumulation": Case(more=dict(schedule=dict(microbatches=2))),
    "activation checkpoint": Case(train=dict(activation_checkpoint="full")),
    "workers": Case(more=dict(data=dict(type=Tokens, num_workers=2))),
    "own": Case(own=True, hooks=(Options,)),
    "own stream": Case(own=True, data=Stream),
    "own loader": Case(own=True, data=shuffled),
    "data": Case(2, dict(data=2), own=True),
    "1d": Case(2, dict(tensor=2)),
    "1f1b": Case(2, dict(pipeline=2), dict(schedule=PIPELINE), is_long=True),
    "zb-v": Case(2, dict(pipeline=2), dict(schedule=ZB_V)),
    "ring": Case(2, dict(sequence=2), dict(model=GPT | dict(attention_dropout=0.0)), is_long=True),
    "ulysses": Case(
        2, dict(sequence=dict(size=2, mode="ulysses")), dict(model=GPT | dict(attention_dropout=0.0)), is_long=True
    ),
    "zero 2": Case(2, dict(data=2, zero=2), own=True, is_long=True),
    "zero 3": Case(2, dict(data=2, zero=3)),
    "zero 2 fp16": Case(2, dict(data=2, zero=2), train=FP16, is_long=True),
    "local steps": Case(2, dict(data=2, strategy=dict(type=LocalSteps, every=2))),
    "2d": Case(4, dict(tensor=dict(mode="2d", size=4))),
    "3d": Case(4, dict(tensor=dict(mode="3d", shape=(2, 1, 2)))),
    "data, pipeline, zero": Case(4, dict(data=2, pipeline=2, zero=3), dict(schedule=PIPELINE), FP16, is_long=True),
    "3d, 8 ranks": Case(8, dict(tensor=dict(mode="3d", size=8)), is_long=True),
}


def train(rank: int, root: Path, cases: Mapping[str, Case], resume: bool) -> dict[str, Any]:
    """Body of a rank. Without ``resume``: 2 N steps, saved after N, while the run goes on."""
    told = {}
    for number, (name, case) in enumerate(cases.items()):
        whole, halves = root / f"{case.world}.{number}", root / f"{case.world}.{number}.resumed"
        wanted = str(whole / name_of(HALF)) if resume else None
        engine = colossus.initialize(case.config(halves if resume else whole, wanted), **case.options)
        recorder = Recorder()
        torch.rand(number + 7 * resume)  # what came before is not what makes them equal
        summary = fit(engine, [recorder, *(make() for make in case.hooks)])
        assert summary.steps == 2 * HALF
        assert engine.checkpoints.resumed_from == (Path(wanted) if wanted else None)
        assert recorder.own == 2 * HALF
        told[name] = recorder.numbers, [buffer.tolist() for buffer in engine.model.buffers()]
        engine.close()
    return told


def worlds() -> list[Any]:
    """Of each number of ranks the cases that run by default, and those that run for long."""
    params = []
    for world in sorted({case.world for case in CASES.values()}):
        for is_long in (False, True):
            names = [name for name, case in CASES.items() if case.world == world and case.is_long == is_long]
            if names:
                marks = pytest.mark.long if is_long or world == 1 else ()
                params.append(pytest.param(world, names, id=f"{world} ranks{' long' * is_long}", marks=marks))
    return params


@pytest.mark.rest("4 ranks")
@pytest.mark.parametrize(("world", "names"), worlds())
def test_two_halves_are_the_whole(tmp_path: Path, world: int, names: list[str]) -> None:
    cases = {name: CASES[name] for name in names}
    whole = run_ranks(world, train, tmp_path, cases, False, with_context=False)
    halves = run_ranks(world, train, tmp_path, cases, True, with_context=False)
    problems = []
    for number, name in enumerate(cases):
        try:
            for rank in range(world):
                (numbers, buffers), (wanted, wanted_buffers) = halves[rank][name], whole[rank][name]
                assert_same_numbers(numbers, wanted, f"rank {rank}")
                assert buffers == wanted_buffers, f"rank {rank}: running statistics"
            ends = [tmp_path / f"{world}.{number}{suffix}" / name_of(2 * HALF) for suffix in ("", ".resumed")]
            assert_same_contents(contents(ends[1]), contents(ends[0]), "the end")
            assert_same_values(of_ranks(ends[1]), of_ranks(ends[0]), "the end")
            if "fp16" in name:
                assert_scale_changed(contents(ends[0].with_name(name_of(HALF))).values, contents(ends[0]).values)
        except AssertionError as error:
            problems.append(f"{name}: {str(error).splitlines()[0]}")
    assert not problems, "\n".join(problems)


def assert_same_numbers(mine: list[Any], wanted: list[Any], what: str) -> None:
    for step, (one, other) in enumerate(zip(mine, wanted, strict=True), 1):
        same = all(a == b or (a != a and b != b) for a, b in zip(one, other, strict=True))
        assert same, f"{what}, step {step}: loss and norm {one}, were {other}"


def assert_scale_changed(first: dict[str, Any], last: dict[str, Any]) -> None:
    """Also that steps were skipped: the case tells nothing otherwise."""
    assert first["train"]["num_skipped"] >= 1, first["train"]
    assert first["loss_scale"]["scale"] != last["loss_scale"]["scale"]


def of_ranks(folder: Path) -> dict[str, Any]:
    """What belongs to single ranks: generators, places in the data, buffers that differ."""
    with CheckpointReader(folder) as reader:
        values = {
            path: decode(value, reader.tensor)
            for path, value in reader.manifest.values.items()
            if path.startswith(("ranks/", "loader/"))
        }
        return values | {key: reader.tensor(key) for key in reader.manifest.tensors if "/buffers/" in key}
