"""A model of many equal layers is known by one of two."""

from __future__ import annotations

from typing import Any

import pytest

from colossus.config import load_config
from colossus.planner import layout_profile
from colossus.planner.layout_profile import BlockProfile

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
