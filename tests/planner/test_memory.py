"""Predicted memory beside what real ranks hold after two steps, and what their allocators give out in a third."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.ranks import run_ranks
from helpers.training import SIZES, batch_of, config_of
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import colossus
from benchmarks.memory import allocated_peak, live_bytes
from colossus.config import Config, load_config
from colossus.optim.adafactor import Adafactor
from colossus.optim.whole import WholeParameters
from colossus.planner import block_runs
from colossus.planner.memory import predict_memory
from colossus.planner.rank_memory import PlanMemory
from colossus.planner.remedies import remedies

#: so large that buffers of a few hundred bytes do not count
MODEL = {**SIZES, "hidden_size": 64, "vocab_size": 530, "seq_len": 64}
MOE = dict(type="Llama", **MODEL, experts=dict(num=4, top_k=2))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("by", torch.ones(100, 64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by[0]


class Buffered(nn.Sequential):
    """A chain whose first stage has a buffer."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(nn.Embedding(530, 64), Scale(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 530))

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        labels = batch["labels"].flatten()
        return F.cross_entropy(outputs.flatten(0, 1), labels, reduction="sum"), labels.numel()


Case = tuple[dict[str, Any], dict[str, Any]]
MB2, MB4 = dict(schedule=dict(microbatches=2)), dict(schedule=dict(microbatches=4))
BF16_MASTERS = dict(train=dict(precision=dict(params="bf16")))

#: on two ranks
CASES: dict[str, Case] = {
    "data": (dict(data=2), MB2),
    "1d": (dict(tensor=dict(size=2, sequence_sharded=True)), dict(train=dict(activation_checkpoint="full"), **MB2)),
    "zero_2_masters": (dict(data=2, zero=2), {**BF16_MASTERS, **MB2}),
    "zero_3": (dict(data=2, zero=3), {}),
    "pipeline": (dict(pipeline=2), MB4),
}
MORE_CASES: dict[str, Case] = {
    "one_microbatch": (dict(data=2), {}),
    "bf16": (dict(data=2), dict(train=dict(precision="bf16"))),
    "masters": (dict(data=2), {**BF16_MASTERS, **MB2}),
    "zero_1_muon": (dict(data=2, zero=1), dict(optimizer=dict(type="Muon", lr=1e-3, weight_decay=0.0))),
    "adafactor": (dict(tensor=2), dict(optimizer=dict(type="Adafactor", lr=1e-3, weight_decay=0.0), **MB2)),
    "whole": (dict(data=2, zero=1), dict(optimizer=dict(type="Adam", whole=True, weight_decay=0.0))),
    "sgd": (dict(data=2, zero=3), dict(optimizer=dict(type="SGD", momentum=0.9, weight_decay=0.0))),
    "ring": (dict(sequence=2), {}),
    "ulysses": (dict(sequence=dict(size=2, mode="ulysses")), MB2),
    "interleaved": (
        dict(pipeline=2),
        dict(model=dict(num_layers=4), schedule=dict(type="interleaved", microbatches=4, chunks=2)),
    ),
    "llama": (dict(pipeline=2), dict(model=dict(type="Llama", tie_embeddings=False), **MB4)),
    "buffers": (dict(pipeline=2), dict(model=dict(type=Buffered), **MB4)),
    "zb-h1": (dict(pipeline=2), dict(schedule=dict(type="zb-h1", microbatches=4))),
    "expert": (dict(data=2, expert=2), dict(model=MOE, **MB2)),
    "selective": (dict(tensor=2), dict(train=dict(activation_checkpoint="selective"), **MB2)),
    "frozen": (
        dict(data=2, zero=1),
        dict(optimizer=dict(groups=[dict(match="*embedding*", frozen=True)])),
    ),
}
#: on four
FOUR: dict[str, Case] = {
    "2d": (dict(tensor=dict(mode="2d", size=4)), MB2),
    "2d_step": (dict(tensor=dict(mode="2d", size=4, weights="step")), MB2),
    "1d_zero_3": (dict(data=2, tensor=2, zero=3), MB2),
    "pipeline_zero_1": (dict(data=2, pipeline=2, zero=1), MB4),
}


class Samples(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return {key: value[0] for key, value in batch_of(index, MODEL, 1).items()}


def _config(case: Case) -> dict[str, Any]:
    plan, more = case
    model, train = more.get("model", {}), dict(more.get("train", {}))
    rest = {key: value for key, value in more.items() if key not in ("model", "train")}
    precision = train.pop("precision", "fp32")
    made = config_of(plan, 4, precision, model={"type": "GPT", **MODEL, **model}, train=train, **rest)
    return {**made, "data": Samples()}


def _bytes(held: list[Any]) -> int:
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held if isinstance(x, Tensor)}
    return sum(storages.values())


def _measured(rank: int, cases: list[dict[str, Any]]) -> list[dict[str, int]]:
    """Of a real run of each case: bytes that are stored after two steps, and held at most in a third."""
    return [_measure(config) for config in cases]


def _measure(config: dict[str, Any]) -> dict[str, int]:
    before = live_bytes()
    engine = colossus.initialize(config)
    batch = next(iter(engine.loader))
    for _ in range(2):
        engine.train_step(batch)
    stored, optimizer = engine.store.parameters(), engine.optimizer
    whole = [param.data for block in engine.store.blocks for param in block.params]
    state = list(optimizer.state.values())
    if isinstance(optimizer, Adafactor):
        state += [optimizer.tensor_state, optimizer._sums.counts]
    if isinstance(optimizer, WholeParameters):  # of which owners have values and gradients, too
        owned = [param for group in optimizer.inner.param_groups for param in group["params"]]
        state += [owned, [param.grad for param in owned], list(optimizer.inner.state.values())]
    gradients = sum(param.grad.nbytes for param in stored if param.grad is not None)
    for param in stored:
        param.grad = None  # the profiler does not see when what was there before is freed
    held = live_bytes() - before
    peak = held + allocated_peak(lambda: engine.train_step(batch))
    engine.close()
    return {
        "weights": _bytes([*stored, *engine.model.buffers(), *whole]),
        "gradients": gradients,
        "optimizer": _bytes(tree_leaves(state)),
        "peak": peak,
    }


def _compare(world: int, cases: dict[str, Case]) -> None:
    configs = [_config(case) for case in cases.values()]
    predicted = [predict_memory(load_config(config, nproc=world)) for config in configs]
    measured = run_ranks(world, _measured, configs, with_context=False)
    problems = []
    for number, (name, config, plan) in enumerate(zip(cases, configs, predicted, strict=True)):
        for memory in plan.ranks:
            real = measured[memory.rank * (world // len(plan.ranks))][number]
            stored = memory.stored
            ours = {
                "weights": stored.weights, "gradients": stored.gradients_between, "optimizer": stored.optimizer
            }  # fmt: skip
            problems += [
                f"{name} {kind}: {ours[kind]} predicted, {real[kind]} held" for kind in ours if ours[kind] != real[kind]
            ]
            ratio = memory.total / real["peak"]
            most = 1.4 if config["parallel"].get("zero") == 3 else 1.1 if name in ("selective", "buffers") else 1.05
            if not 0.95 <= ratio <= most:
                problems.append(f"{name} peak: {memory.total} predicted, {real['peak']} counted, {ratio:.3f}")
    assert not problems, "\n".join(problems)


def test_memory_is_what_ranks_hold() -> None:
    """Stored bytes to the byte, peaks within 5 %; of ZeRO-3 the prediction is a bound."""
    _compare(2, CASES)


@pytest.mark.long
def test_memory_of_more_plans() -> None:
    _compare(2, MORE_CASES)


@pytest.mark.long
def test_memory_on_four_ranks() -> None:
    _compare(4, FOUR)


def _predict(**changes: Any) -> PlanMemory:
    plan = changes.pop("parallel")
    return predict_memory(load_config(_config((plan, changes))))


def test_blocks_that_are_not_run_count(monkeypatch: pytest.MonkeyPatch) -> None:
    case = dict(parallel=dict(pipeline=2), model=dict(num_layers=11), **MB4)
    few = _predict(**case)
    monkeypatch.setattr(block_runs, "_RUN", 100)
    assert few == _predict(**case)


def test_a_plan_of_thousands_of_ranks() -> None:
    config = dict(
        parallel=dict(data=64, pipeline=8, tensor=8, zero=1),
        model=dict(type="Llama", num_layers=30, hidden_size=512, num_heads=8, vocab_size=1024, seq_len=128),
        schedule=dict(microbatches=16),
        train=dict(global_batch_size=1024, precision="bf16"),
    )
    plan = predict_memory(load_config({**_config(({}, {})), **config}))
    assert [rank.in_flight for rank in plan.ranks] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert plan.fullest.rank == 1  # the first has the embedding alone


def test_remedies_keep_the_model() -> None:
    config: Config = load_config(_config((dict(data=2), {})))
    assert list(remedies(config))[:3] == [(f"parallel.zero.stage={stage}",) for stage in (1, 2, 3)]
    assert list(remedies(config))[-1] == (
        "parallel.zero.stage=3", "schedule.microbatches=4", "train.activation_checkpoint=full"
    )  # fmt: skip
