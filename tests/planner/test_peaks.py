"""Predicted peaks of plans that people run, beside those of the real engine's step on tensors without values."""

from __future__ import annotations

import pytest
from helpers.real_sizes import REAL_SIZES, SOME

from colossus.config import load_config
from colossus.hardware.data_sheets import FromDataSheet
from colossus.planner.closed_form import ClosedForm
from colossus.planner.fake_step import fake_steps, ranks_of_pipeline
from colossus.planner.memory import predict_memory

#: predicted over counted
LEAST, MOST = 0.98, 1.05


@pytest.mark.parametrize(
    "name", [name if name in SOME else pytest.param(name, marks=pytest.mark.long) for name in REAL_SIZES]
)
def test_predicted_peaks_are_those_of_the_engine(name: str) -> None:
    config = load_config(REAL_SIZES[name])
    predicted = predict_memory(config)
    assert 0 < ClosedForm(config, FromDataSheet("h100")).memory(config) <= predicted.fullest.total
    places = sorted({0, predicted.fullest.rank, len(predicted.ranks) - 1})
    for step in fake_steps(config, ranks_of_pipeline(config, places)):
        rank = predicted.ranks[step.pipeline_rank]
        stored = rank.stored
        assert (stored.weights, stored.gradients_between, stored.optimizer) == (
            step.stored.weights, step.stored.gradients, step.stored.optimizer
        )  # fmt: skip
        ratio = rank.total / step.peak
        assert LEAST <= ratio <= MOST, f"rank {step.pipeline_rank}: {ratio:.3f}; {rank.kinds}"
