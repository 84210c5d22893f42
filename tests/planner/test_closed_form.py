"""Closed forms are below what is predicted in full."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossus.config import Config, load_config
from colossus.hardware.data_sheets import FromDataSheet
from colossus.hardware.typical_cpu import TypicalCPU
from colossus.planner.candidates import Candidate, plans
from colossus.planner.closed_form import ClosedForm
from colossus.planner.estimate import Estimator
from colossus.planner.fixed_keys import FixedKeys
from colossus.planner.model_layouts import layouts
from colossus.schedule.build import make_schedule
from colossus.schedule.simulate import play

MODELS = {
    "GPT": dict(type="GPT", num_layers=4, hidden_size=64, num_heads=4, seq_len=32),
    "untied": dict(type="Llama", num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, seq_len=32, vocab_size=256),
    "experts": dict(type="Llama", num_layers=2, hidden_size=64, num_heads=4, seq_len=32, experts=dict(num=4, every=2)),
}


def config_of(model: str, **sections: Any) -> Config:
    train = dict(global_batch_size=8)
    return load_config(dict(model=MODELS[model], data=dict(type="PythonStdlib"), train=train, **sections))


def every(config: Config, devices: int) -> list[Candidate]:
    fixed = FixedKeys.of(config)
    return [plan for layout in layouts(fixed, devices) for plan in plans(fixed, devices, layout)]


@pytest.mark.parametrize(
    ("model", "hardware", "number"),
    [
        ("GPT", "cpu", 2),
        pytest.param("experts", "h100", 1, marks=pytest.mark.long),
        *(pytest.param(model, "cpu", 30, marks=pytest.mark.long) for model in MODELS),
        *(pytest.param(model, "a100", 30, marks=pytest.mark.long) for model in MODELS),
    ],
)
def test_closed_forms_are_below_what_is_predicted(model: str, hardware: str, number: int) -> None:
    """Of plans of all kinds, on two hosts of four devices."""
    config = config_of(model)
    device = TypicalCPU(4, 1, 8e9) if hardware == "cpu" else FromDataSheet(hardware)
    form, estimator = ClosedForm(config, device, hosts=2), Estimator(device, hosts=2)
    for plan in random.Random(number).sample(every(config, 8), number):
        estimate = estimator.estimate(plan.config, plan.overrides)
        assert 0 < form.seconds(plan.config) <= estimate.seconds, plan.overrides
        least, predicted = form.memory(plan.config), estimate.memory.fullest.total
        assert predicted / 10 < least <= predicted, plan.overrides


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=6), st.integers(1, 9), st.floats(0.1, 0.9))
def test_a_pipeline_waits_at_its_ends(times: list[float], microbatches: int, forward: float) -> None:
    """Stages of any times, played, beside the formula for the best way to share their sum."""
    stages = len(times)

    def duration(action: Any) -> float:
        part = {"forward": forward, "backward": 1 - forward}.get(action.kind, 0.0)
        return part * times[action.stage]

    spans = play(make_schedule("1f1b", stages, microbatches), duration)
    makespan = max(span.end for own in spans for span in own)
    assert makespan >= sum(times) / (1 - (1 - 1 / microbatches) ** stages) * (1 - 1e-9)


def test_less_is_computed_by_more_ranks_and_more_where_it_is_computed_again() -> None:
    config = config_of("GPT")
    form = ClosedForm(config, FromDataSheet("h100"))

    def seconds(*overrides: str) -> float:
        values = dict(model=MODELS["GPT"], train=dict(global_batch_size=8))
        return form.seconds(load_config(values, overrides))

    one = seconds()
    assert seconds("parallel.data=2") == pytest.approx(one / 2)
    assert seconds("train.activation_checkpoint=full") > 1.2 * one
    assert seconds("parallel.pipeline=2", "schedule.microbatches=8") > one / 2


def test_a_model_of_unknown_sizes_has_no_closed_form() -> None:
    config = load_config(dict(model=dict(type="WordsLM")))
    form = ClosedForm(config, FromDataSheet("h100"))
    assert (form.seconds(config), form.memory(config)) == (0, 0)
