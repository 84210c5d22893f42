"""A model of many equal layers is known by two of them; `test_fake_step` puts its memory beside that of real ranks."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.plan_cases import MB4, config_of_case

from colossus.config import load_config
from colossus.planner import equal_blocks, layout_profile
from colossus.planner.layout_profile import BlockProfile
from colossus.planner.memory import predict_memory
from colossus.planner.plan_estimate import PlanMemory

TENSOR = dict(size=4, mode="2d")
SIZES = dict(num_layers=7, hidden_size=64, num_heads=4)
MODELS: dict[str, dict[str, Any]] = {
    "llama": dict(type="Llama", vocab_size=256, seq_len=32, tie_embeddings=False),
    "gpt": dict(type="GPT", vocab_size=256, seq_len=32),
    "experts": dict(type="Llama", vocab_size=256, seq_len=32, experts=dict(num=4, top_k=2)),
}


@pytest.mark.rest("tensor0-llama", "tensor0-gpt", "tensor0-experts")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tensor", [dict(size=1), TENSOR])
def test_facts_and_blocks_are_those_of_the_whole_model(
    name: str, tensor: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(
        dict(
            parallel=dict(tensor=tensor),
            model={**SIZES, **MODELS[name]},
            data=dict(type="PythonStdlib"),
            train=dict(global_batch_size=4),
        )
    )
    few = layout_profile.profile_layout(config)
    monkeypatch.setattr(layout_profile, "shallow", lambda config: (config, 0))
    whole = layout_profile.profile_layout(config)
    assert few.facts == whole.facts
    assert len(few.facts.blocks) == 9
    assert list(map(_numbers, few.blocks)) == list(map(_numbers, whole.blocks))


def _numbers(block: BlockProfile) -> tuple[Any, ...]:
    traces = [(len(trace.events), trace.flops) for trace in (block.forward, block.backward)]
    return *traces, block.saved, block.forward_peak, block.levels, block.passed


def _predict(**changes: Any) -> PlanMemory:
    plan = changes.pop("parallel")
    return predict_memory(load_config(config_of_case((plan, changes))))


def test_blocks_that_are_not_run_count(monkeypatch: pytest.MonkeyPatch) -> None:
    case = dict(parallel=dict(pipeline=2), model=dict(num_layers=11), **MB4)
    few = _predict(**case)
    monkeypatch.setattr(equal_blocks, "_RUN", 100)
    assert few == _predict(**case)


def test_a_plan_of_thousands_of_ranks() -> None:
    config = dict(
        parallel=dict(data=64, pipeline=8, tensor=8, zero=1),
        model=dict(type="Llama", num_layers=30, hidden_size=512, num_heads=8, vocab_size=1024, seq_len=128),
        schedule=dict(microbatches=16),
        train=dict(global_batch_size=1024, precision="bf16"),
    )
    plan = predict_memory(load_config({**config_of_case(({}, {})), **config}))
    assert [rank.in_flight for rank in plan.ranks] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert plan.fullest.rank == 1  # the first has the embedding alone
