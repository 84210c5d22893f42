"""Learning rates by step: against the same schedules of torch and transformers, and what is refused."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import optimization

from colossus.config import Config, ConfigError, load_config
from colossus.config.learning_rates import LearningRates
from colossus.registry import LR_SCHEDULES

PAGE = Path(__file__).parents[2] / "docs" / "learning-rates.md"
PEAK, WARMUP, STEPS = 0.3, 7, 50
scheduler = torch.optim.lr_scheduler


def rates(steps: int = STEPS, train: dict[str, Any] | None = None, **schedule: Any) -> list[float]:
    config = load_config(dict(optimizer=dict(lr=PEAK), train=dict(steps=steps, **(train or {})), lr_schedule=schedule))
    schedule_of_run = LearningRates(config)
    return [schedule_of_run.at(step) for step in range(steps)]


def theirs(make: Any, *args: Any, steps: int = STEPS, **options: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=PEAK, momentum=0.9)
    schedule, learning_rates = make(optimizer, *args, **options), []
    for _ in range(steps):
        learning_rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return learning_rates


def assert_same(mine: list[float], other: list[float], since: int = 0) -> None:
    assert len(set(other[since:])) > 1 or len(other) == since
    assert mine[since:] == pytest.approx(other[since:], rel=1e-12, abs=1e-15)


#: names -> ours, theirs, without a warm-up
OF_TORCH: dict[str, tuple[dict[str, Any], tuple[Any, dict[str, Any]]]] = {
    "cosine": (dict(min_ratio=0.1), (scheduler.CosineAnnealingLR, dict(T_max=STEPS, eta_min=0.1 * PEAK))),
    "polynomial": (dict(power=1.7), (scheduler.PolynomialLR, dict(total_iters=STEPS, power=1.7))),
    "step": (dict(every=0.25, gamma=0.6), (scheduler.StepLR, dict(step_size=12, gamma=0.6))),
    "multistep": (dict(milestones=[30, 0.24]), (scheduler.MultiStepLR, dict(milestones=[12, 30]))),
}
#: those with a warm-up, which begins at 0 there: ours, theirs
OF_TRANSFORMERS: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "linear": (dict(), optimization.get_linear_schedule_with_warmup, dict(num_training_steps=STEPS)),
    "polynomial": (
        dict(power=2.0, min_ratio=0.2),
        optimization.get_polynomial_decay_schedule_with_warmup,
        dict(num_training_steps=STEPS, power=2.0, lr_end=0.2 * PEAK),
    ),
    "inverse_sqrt": (dict(), optimization.get_inverse_sqrt_schedule, dict()),
    "cosine_restarts": (
        dict(cycles=3),
        optimization.get_cosine_with_hard_restarts_schedule_with_warmup,
        dict(num_training_steps=STEPS, num_cycles=3),
    ),
    **{
        f"wsd {shape}": (
            dict(decay=10, shape=shape, min_ratio=0.05),
            optimization.get_wsd_schedule,
            dict(num_decay_steps=10, num_training_steps=STEPS, decay_type=shape, min_lr_ratio=0.05),
        )
        for shape in ("linear", "cosine", "1-sqrt")
    },
}


@pytest.mark.parametrize("name", OF_TORCH)
def test_a_schedule_is_that_of_torch(name: str) -> None:
    own, (make, options) = OF_TORCH[name]
    assert_same(rates(type=name, **own), theirs(make, **options))


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_a_schedule_is_that_of_transformers_behind_the_warm_up(name: str) -> None:
    own, make, options = OF_TRANSFORMERS[name]
    mine = rates(type=name.split()[0], warmup_steps=WARMUP, **own)
    assert_same(mine, theirs(make, num_warmup_steps=WARMUP, **options), since=WARMUP)
    assert mine[:WARMUP] == pytest.approx([PEAK * (step + 1) / WARMUP for step in range(WARMUP)])


def test_cycles_that_grow_end_with_the_run() -> None:
    mine = rates(steps=63, type="cosine_restarts", cycles=3, mult=2, min_ratio=0.1)
    again = scheduler.CosineAnnealingWarmRestarts
    assert_same(mine, theirs(again, T_0=9, T_mult=2, eta_min=0.1 * PEAK, steps=63))
    assert [step for step in range(1, 63) if mine[step] > mine[step - 1]] == [9, 27]


def test_behind_the_schedule_its_last_value_stays() -> None:
    for name, own in (("cosine_restarts", dict(cycles=2)), ("wsd", dict(decay=0.5)), ("polynomial", {})):
        assert rates(train=dict(schedule_steps=20), type=name, min_ratio=0.1, **own)[20:] == [
            pytest.approx(0.1 * PEAK)
        ] * (STEPS - 20)


def _of_the_place(progress: float, min_ratio: float, step: int, schedule_steps: int, share: float = 1.0) -> float:
    return share * step / schedule_steps


def test_a_function_gets_what_it_names_of_its_place() -> None:
    assert rates(type=_of_the_place, share=0.5) == pytest.approx([PEAK * step / STEPS / 2 for step in range(STEPS)])
    learning_rates = rates(type=_of_the_place, step=10, share=1.0)  # an option of one's own by that name
    assert learning_rates == pytest.approx([PEAK / 5] * STEPS)


# -- schedulers of torch ----------------------------------------------------------------------------------------------


def _sequence(optimizer: Any, first: int) -> Any:
    parts = [scheduler.ConstantLR(optimizer, 0.5, first), scheduler.ExponentialLR(optimizer, 0.9)]
    return scheduler.SequentialLR(optimizer, parts, milestones=[first])


@pytest.mark.parametrize(
    ("kind", "make", "options"),
    [
        ("torch.optim.lr_scheduler:CosineAnnealingLR", scheduler.CosineAnnealingLR, dict(T_max=11)),
        (scheduler.CyclicLR, scheduler.CyclicLR, dict(base_lr=0.01, max_lr=0.2, step_size_up=5)),
        (scheduler.OneCycleLR, scheduler.OneCycleLR, dict(max_lr=2 * PEAK, total_steps=STEPS)),
        (_sequence, _sequence, dict(first=6)),
    ],
)
def test_any_scheduler_of_torch_behind_the_warm_up(kind: Any, make: Any, options: dict[str, Any]) -> None:
    mine, other = rates(type=kind, warmup_steps=WARMUP, **options), theirs(make, **options)
    assert_same(mine[WARMUP:], other[: STEPS - WARMUP])
    assert mine[WARMUP - 1] == PEAK

    config = load_config(
        dict(optimizer=dict(lr=PEAK), train=dict(steps=STEPS), lr_schedule=dict(type=kind, warmup_steps=7, **options))
    )
    resumed = LearningRates(config)  # of a run that begins in the middle, and looks back
    assert [resumed.at(step) for step in (30, 12)] == [mine[30], mine[12]]


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (dict(type="polynomial", power=0), "lr_schedule.power: must be greater than 0, got 0"),
        (dict(type="wsd", deacy=0.1), "lr_schedule.deacy: no such key; did you mean lr_schedule.decay?"),
        (dict(type="wsd", decay=1.5), "lr_schedule.decay: must be steps, 1 or more, or a fraction of train.schedule"),
        (dict(type="wsd", decay=45, warmup_steps=7), "warmup_steps = 7 and decay = 45 steps are more than"),
        (dict(type="multistep"), "lr_schedule.milestones: is missing"),
        (dict(type="multistep", milestones=[]), "lr_schedule.milestones: must not be empty"),
        (dict(type="one_cycle"), "use torch's, torch.optim.lr_scheduler:OneCycleLR, with max_lr and total_steps"),
        (dict(type="StepLR"), "use torch's by its path, torch.optim.lr_scheduler:StepLR"),
        (dict(type="inverse_sqrt"), "set warmup_steps, or timescale"),
        (dict(type="cosine_restarts", cycles=2.5), "lr_schedule.cycles: must be a whole number, got 2.5"),
        (
            dict(type=scheduler.ReduceLROnPlateau),
            "its step is called without arguments (missing a required argument: 'metrics')",
        ),
        (
            dict(type=scheduler.StepLR, stepsize=3),
            "lr_schedule.stepsize: no such key; did you mean lr_schedule.step_size?",
        ),
        (dict(type=scheduler.StepLR, step_size=3, min_ratio=0.1), "has an end of its own, such as eta_min"),
        (dict(type=scheduler.OneCycleLR, max_lr=0.1, total_steps=9), "OneCycleLR: Tried to step 10 times"),
    ],
)
def test_what_a_schedule_cannot_do_is_told(schedule: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rates(**schedule)
    assert words in str(caught.value)
    assert str(caught.value).startswith("lr_schedule")


def test_the_warm_up_counts_as_steps_of_the_run() -> None:
    learning_rates = rates(steps=20, type="multistep", milestones=[10], gamma=0.5, warmup_steps=4)
    assert [step for step in range(1, 20) if learning_rates[step] < learning_rates[step - 1]] == [10]
    assert math.isclose(max(learning_rates), PEAK)


def test_the_configs_of_the_page_are_right() -> None:
    text = PAGE.read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    for block in blocks:
        names: dict[str, Any] = {}
        exec(block, names)
        load_config({key: value for key, value in names.items() if key in Config.model_fields})
    named = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", text, re.M))))
    assert named - {"lr_schedule"} == set(LR_SCHEDULES.names())
