"""Predicted peaks of plans that people run, beside those of the real engine's step on tensors without values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.real_sizes import LLAMA_8B, REAL_SIZES, SOME, run_of

from colossus.config import load_config
from colossus.hardware.data_sheets import FromDataSheet
from colossus.planner.closed_form import ClosedForm
from colossus.planner.fake_step import fake_steps
from colossus.planner.memory import predict_memory

#: predicted over counted
LEAST, MOST = 0.98, 1.05


@pytest.mark.parametrize(
    "name", [name if name in SOME else pytest.param(name, marks=pytest.mark.long) for name in REAL_SIZES]
)
def test_predicted_peaks_are_those_of_the_engine(name: str) -> None:
    _check(REAL_SIZES[name])


def _check(settings: dict[str, Any]) -> int:
    """Compare predicted peaks with counted ones, and return the largest of these."""
    config = load_config(settings)
    predicted = predict_memory(config)
    assert 0 < ClosedForm(config, FromDataSheet("h100")).memory(config) <= predicted.fullest.total
    places = sorted({0, predicted.fullest.rank, len(predicted.ranks) - 1})
    steps = fake_steps(config, places)
    for step in steps:
        rank = predicted.ranks[step.pipeline_rank]
        stored = rank.stored
        assert replace(stored, update=0, on_host=0) == step.stored
        ratio = rank.total / step.peak
        assert LEAST <= ratio <= MOST, f"rank {step.pipeline_rank}: {ratio:.3f}; {rank.kinds}"
    return max(step.peak for step in steps)


@pytest.mark.long
@pytest.mark.parametrize("plan", [dict(tensor=dict(size=8, sequence_sharded=True)), dict(data=8, zero=3)])
def test_chunks_of_the_head_lower_the_peak_by_the_logits(plan: dict[str, Any]) -> None:
    """A rank never has more than a chunk of the logits, their gradient and their copy in float32."""
    whole, chunked = (
        _check(run_of({**LLAMA_8B, "loss_chunk": chunk}, layers=2, recompute="full", **plan)) for chunk in (None, 512)
    )
    logits = LLAMA_8B["seq_len"] * LLAMA_8B["vocab_size"] / plan.get("tensor", dict(size=1))["size"]  # type: ignore[operator]
    assert whole - chunked > 2 * logits
