"""The law of steadiness: after the first steps nothing grows, whatever the plan, over steps, and over engines made and
closed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from helpers.holdings import Holdings
from helpers.ranks import run_ranks
from helpers.steady import PERIOD, SIZES, Case, Length, Sentences, growth_of_generation, growth_of_training
from torch import Tensor, nn
from torch.utils.data import DataLoader

from colossus import initialize, layers, parallelize
from colossus.config import load_config
from colossus.config.errors import ConfigError
from colossus.config.training import ActivationCheckpoint
from colossus.engine.engine import Engine
from colossus.engine.fit import fit
from colossus.registry import OPTIMIZERS, SCHEDULES, SEQUENCE_MODES, STRATEGIES, TENSOR_MODES, TORCH_OPTIMIZERS

#: options of strategies that have to be said
STRATEGY_OPTIONS: dict[str, dict[str, Any]] = {
    "diloco": dict(period=PERIOD),
    "hierarchical": dict(hosts=2),
    "local_sgd": dict(period=PERIOD),
    "slowmo": dict(period=PERIOD),
    "zero": dict(stage=2),
}


LONG = Length((5, 61), 10)


def batches(split: str) -> DataLoader[dict[str, Tensor]]:
    """A user's own loader, with a worker."""
    return DataLoader(Sentences(split), batch_size=8, num_workers=1, drop_last=True)


def as_it_is() -> nn.Module:
    """A model of plain torch, in which pairs are searched."""
    return parallelize(WithLoss, example=torch.zeros(2, SIZES["seq_len"], dtype=torch.int64))()


class WithLoss(nn.Module):
    embedding: type[nn.Module] = nn.Embedding

    def __init__(self, **options: Any) -> None:
        super().__init__()
        width = SIZES["hidden_size"]
        self.ids = self.embedding(SIZES["vocab_size"], width, **options)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, SIZES["vocab_size"]))

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.ids(inputs))
        return out

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        labels = batch["labels"].flatten()
        return F.cross_entropy(outputs.flatten(0, 1), labels, reduction="sum"), len(labels)


class WithTable(WithLoss):
    embedding = layers.Embedding

    def __init__(self) -> None:
        super().__init__(sparse=True)


PACKED = dict(type="Packed", source=dict(type="StdlibFiles", max_bytes=100_000))
MIXTURE = dict(
    model=dict(type="Llama", **{**SIZES, "vocab_size": 256}),
    data=dict(
        type="Mix", sources=dict(one=PACKED, other={**PACKED, "strategy": "greedy"}), weights=dict(one=1, other=3)
    ),
)
BUDGET = dict(
    model=dict(type="Llama", **{**SIZES, "vocab_size": 256}),
    data={**PACKED, "strategy": "none"},
    train=dict(tokens_per_microbatch=24),
)
TABLES = dict(model=dict(type=WithTable), optimizer=dict(tables=dict(type="SparseAdam")))


def smallest(sizes: list[tuple[int, dict[str, Any]]], **more: Any) -> Case:
    """The first of the plans, each with its ranks, that the config takes."""
    problems = ""
    for world, plan in sizes:
        case = Case(world, plan, more)
        try:
            load_config(case.config(Path("."), 1), nproc=world)
        except ConfigError as error:
            problems += f"{plan}: {error}\n"
        else:
            return case
    raise AssertionError(problems)


def cases() -> dict[str, Case]:
    """All that the registries have."""
    found = {}
    shapes: list[tuple[int, dict[str, Any]]] = [
        (2, dict(size=2)), (4, dict(size=4)), (4, dict(shape=(2, 1, 2))), (8, dict(size=8))
    ]  # fmt: skip
    for mode in TENSOR_MODES.names():
        found[f"tensor {mode}"] = smallest([(n, dict(tensor=dict(mode=mode, **shape))) for n, shape in shapes])
    for mode in SEQUENCE_MODES.names():
        found[f"sequence {mode}"] = smallest([(n, dict(sequence=dict(mode=mode, size=n))) for n in (2, 4)])
    for schedule in SCHEDULES.names():
        found[f"schedule {schedule}"] = Case(2, dict(pipeline=2), dict(schedule=dict(type=schedule, microbatches=4)))
    for strategy in STRATEGIES.names():
        options = dict(type=strategy, **STRATEGY_OPTIONS.get(strategy, {}))
        found[f"strategy {strategy}"] = smallest([(n, dict(data=n, strategy=options)) for n in (2, 4)])
    for stage in (1, 2, 3):
        found[f"zero {stage}"] = Case(2, dict(data=2, zero=stage))
    for kind in get_args(ActivationCheckpoint.model_fields["type"].annotation):
        train = dict(activation_checkpoint=kind)
        found[f"recomputed {kind}"] = Case(4, dict(tensor=2, sequence=2), dict(train=train))
    for optimizer in sorted(set(OPTIMIZERS.names()) - set(TORCH_OPTIMIZERS)):
        options = dict(type=optimizer, lr=1e-3)
        found[f"optimizer {optimizer}"] = Case(4, dict(data=2, tensor=2, zero=1), dict(optimizer=options))
    found["data 2 x tensor 2"] = Case(4, dict(data=2, tensor=2))
    found["data, a worker"] = Case(2, dict(data=2), dict(data=dict(type=Sentences, num_workers=1)))
    found["data, a loader"] = Case(2, dict(data=2), dict(data=dict(type=batches)))
    found["a model as it is"] = Case(2, dict(tensor=2), dict(model=dict(type=as_it_is)))
    found["products in panels"] = Case(2, dict(tensor=dict(size=2, sequence_sharded=True, panels=2)))
    beside = dict(loss_chunk=8, objective=dict(type="distillation"), reference=dict(model=dict(num_layers=1)))
    found["a reference, chunks of the head"] = Case(2, dict(data=2), dict(model=dict(type="GPT", **beside)))
    linear = dict(type="Llama", **SIZES, linear=dict(num_heads=2, key_dim=8, value_dim=8), attention_pattern=["linear"])
    found["linear attention over a ring"] = Case(2, dict(sequence=2), dict(model=linear))
    found["a mixture of packed documents"] = Case(2, dict(data=2), MIXTURE)
    found["the same bits"] = Case(4, dict(data=2, pipeline=2), dict(train=dict(reproducible="plan")))
    found["a budget of tokens"] = Case(2, dict(pipeline=2), BUDGET)
    adapters = dict(type="GPT", lora=dict(rank=2))
    found["adapters"] = Case(2, dict(tensor=2), dict(model=adapters))
    found["tables"] = Case(2, dict(data=2, strategy=dict(type="hybrid", ways={"*": "owners"})), TABLES)
    return found


CASES = cases()


@pytest.mark.rest("sequence ring")
@pytest.mark.parametrize("name", ["sequence ring", "zero 3"])
def test_nothing_grows(name: str, tmp_path: Path) -> None:
    assert not growth_of_training(CASES[name], Length((5, 13), 2), tmp_path)


def left_by_closed_engines(rank: int, names: list[str], folder: Path) -> dict[str, list[str]]:
    """What there is more of than before, of each case, while its closed engine is still referred to."""
    left = {}
    for name in names:
        run(CASES[name].config(folder / name / "first", 2)).close()  # torch opens files of its own once
        before = Holdings()
        engine = run(CASES[name].config(folder / name, 2))
        engine.close()
        kinds = ("threads", "child processes", "process groups", "open files", "mappings")
        left[name] = [line for line in Holdings().growth_since(before) if line.startswith(kinds)]
        params = [*engine.model.parameters(), *engine.store.parameters()]
        left[name] += [f"hooks on {param.shape}" for param in params if getattr(param, _HOOKS)]
    return left


def run(config: dict[str, Any]) -> Engine:
    engine = initialize(config)
    fit(engine)
    return engine


_HOOKS = "_post_accumulate_grad_hooks"


def test_a_closed_engine_has_nothing_open(tmp_path: Path) -> None:
    """Nobody has to wait for the garbage collector, nor to forget the engine."""
    names = ["sequence ring", "zero 3", "data, a worker", "schedule 1f1b"]
    for left in run_ranks(2, left_by_closed_engines, names, tmp_path, with_context=False):
        assert left == {name: [] for name in names}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_nothing_grows_for_long(name: str, tmp_path: Path) -> None:
    assert not growth_of_training(CASES[name], LONG, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("plan", ["", "data", "tensor", "pipeline"])
def test_nothing_grows_where_text_is_made(plan: str, tmp_path: Path) -> None:
    assert not growth_of_generation(Case(2 if plan else 1, {plan: 2} if plan else {}), LONG, tmp_path)
