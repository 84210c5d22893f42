"""A run that goes on with another learning rate than its checkpoint would, or trains other parameters, is told so."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.resumed import CLASSES, WIDTH, Listener, Vectors, classify, loaded, save_after, settings
from torch import nn
from torch.optim import lr_scheduler

import colossus
from colossus import layers

PEAK, STEPS, DONE = 1e-2, 8, 3
COSINE: dict[str, Any] = dict(type="cosine")
WSD: dict[str, Any] = dict(type="wsd", decay=2)


def torch_rate(kind: Any, **options: Any) -> float:
    """Return torch's learning rate of the step behind ``DONE`` steps."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    scheduler = kind(optimizer, **options)
    for _ in range(DONE):
        optimizer.step()
        scheduler.step()
    return float(optimizer.param_groups[0]["lr"])


def half(progress: float, min_ratio: float) -> float:
    return 0.5


def one_cycle(optimizer: Any, total_steps: int) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=2 * PEAK, total_steps=total_steps)


def saved_rate(schedule: dict[str, Any], steps: int = STEPS) -> float:
    """Return what torch gives for a schedule."""
    if schedule["type"] == "linear":
        return torch_rate(lr_scheduler.LinearLR, start_factor=1.0, end_factor=1e-30, total_iters=steps)
    return torch_rate(lr_scheduler.CosineAnnealingLR, T_max=steps)


#: schedule and steps then, settings now, the learning rates then and now, what is told to have changed
JUMPS: dict[str, tuple[dict[str, Any], dict[str, Any], float, float, str]] = {
    "more steps": (COSINE, dict(train=dict(steps=16)), saved_rate(COSINE), saved_rate(COSINE, 16),
                   "train.schedule_steps was 8 and is 16"),
    "fewer steps": (dict(type="linear"), dict(train=dict(steps=5)), saved_rate(dict(type="linear")),
                    saved_rate(dict(type="linear"), 5), "train.schedule_steps was 8 and is 5"),
    "another schedule": (COSINE, dict(lr_schedule=dict(type="linear")), saved_rate(COSINE),
                         saved_rate(dict(type="linear")), "lr_schedule.type was 'cosine' and is 'linear'"),
    "one of the user": (COSINE, dict(lr_schedule=dict(type=half)), saved_rate(COSINE), PEAK / 2, "test_changed_"),
    "a warm-up": (dict(type="constant"), dict(lr_schedule=dict(warmup_steps=10)), PEAK, PEAK * 0.4,
                  "lr_schedule.warmup_steps was 0 and is 10"),
    "a longer stable phase": (dict(type="wsd", decay=6), dict(train=dict(steps=16)), PEAK * 5 / 6, PEAK,
                              "train.schedule_steps was 8 and is 16"),
    "torch's": (dict(type=one_cycle, total_steps=8), dict(lr_schedule=dict(total_steps=16)),
                torch_rate(one_cycle, total_steps=8), torch_rate(one_cycle, total_steps=16),
                "lr_schedule.total_steps was 8 and is 16"),
    "with another peak": (COSINE, dict(train=dict(steps=16), optimizer=dict(lr=2e-2)), saved_rate(COSINE),
                          2 * saved_rate(COSINE, 16), "train.schedule_steps was 8 and is 16"),
}  # fmt: skip
#: schedule then, settings now, how many warnings there are
QUIET: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "the same": (COSINE, dict(train=dict(steps=8)), 0),
    "only the peak": (COSINE, dict(optimizer=dict(lr=2e-2)), 1),
    "a stable phase": (WSD, dict(train=dict(steps=16)), 0),
    "the schedule's own length": (COSINE, dict(train=dict(steps=16, schedule_steps=8)), 0),
}


def go_on(rank: int, folder: Path, schedule: dict[str, Any], more: dict[str, Any]) -> tuple[float, list[str]]:
    """Body of a rank: the learning rate of the next step, and what was told."""
    config = dict(lr_schedule=schedule, train=dict(steps=STEPS))
    if rank == 0:
        save_after(0, DONE, settings(folder, **config))
    now = settings(folder / "now", **config)
    for key, value in more.items():
        now[key] = {**({} if "type" in value else now[key]), **value}
    lr, told, refused = loaded(0, folder, now, lambda engine: engine.train_step(next(engine.loader)).lr, {})
    assert not refused
    return lr, [*told]  # which hears of the next ones, too


def go_on_often(rank: int, folder: Path) -> dict[str, tuple[float, list[str]]]:
    cases = {name: case[:2] for name, case in (*JUMPS.items(), *QUIET.items())}
    return {name: go_on(rank, folder / name, schedule, more) for name, (schedule, more) in cases.items()}


def test_a_learning_rate_that_jumps_is_told(tmp_path: Path) -> None:
    (by_case,) = run_ranks(1, go_on_often, tmp_path, with_context=False)
    for name, (_, _, then, now, changed) in JUMPS.items():
        lr, lines = by_case[name]
        assert lr == pytest.approx(now, rel=1e-10), name
        assert lines[-1].startswith(
            f"the learning rate jumps: that of step {DONE + 1} is {now:.6g}, with the settings of the checkpoint it "
            f"would be {then:.6g} ("
        ), (name, lines, then, now)
        assert changed in lines[-1], (name, lines)
        assert len(lines) == 1 + (name == "with another peak"), (name, lines)
    for name, (_, _, count) in QUIET.items():
        assert len(by_case[name][1]) == count, (name, by_case[name])


# -- what is trained --------------------------------------------------------------------------------------------

FIRST, LAST = ["0.weight", "0.bias"], ["2.weight", "2.bias"]
NEW, GONE = "trained now, and frozen in the checkpoint: ", "frozen now, and trained in the checkpoint: "


def chain() -> nn.Module:
    return nn.Sequential(layers.Linear(WIDTH, 8), nn.Tanh(), layers.Linear(8, CLASSES))


def frozen(*patterns: str) -> dict[str, Any]:
    return dict(type="AdamW", lr=PEAK, groups=[dict(match=patterns, frozen=True)] if patterns else [])


#: frozen then, frozen now, what is told
TRAINED: dict[str, tuple[tuple[str, ...], tuple[str, ...], list[str]]] = {
    "thawed": (("0.*",), (), [NEW + ", ".join(FIRST) + "."]),
    "thawed at the end": (("2.*",), (), [NEW + ", ".join(LAST) + "."]),
    "frozen": ((), ("*.bias",), [GONE + "0.bias, 2.bias."]),
    "exchanged": (("0.*",), ("2.*",), [NEW + ", ".join(FIRST) + ".", GONE + ", ".join(LAST) + "."]),
    "the same": (("0.*",), ("0.*",), []),
}


def train_others(rank: int, folder: Path, parallel: dict[str, Any]) -> dict[str, list[str]]:
    listener = Listener()
    logging.getLogger("colossus.engine").addHandler(listener)
    heard = {}
    for name, (then, now, _) in TRAINED.items():
        for is_later, patterns in ((False, then), (True, now)):
            config = settings(folder / name, parallel, schedule=dict(microbatches=2))
            config["optimizer"] = frozen(*patterns)
            engine = colossus.initialize(config, model=chain, loss_fn=classify, data=Vectors())
            if is_later:
                listener.told.clear()
                engine.checkpoints.load(folder / name)
            engine.train_step(next(engine.loader))
            if not is_later:
                engine.checkpoints.save().wait()
            engine.close()
        heard[name] = [line for line in listener.told if line.startswith((NEW, GONE))]
    return heard


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (1, {}),
        *(
            pytest.param(2, parallel, marks=pytest.mark.long)
            for parallel in (dict(pipeline=2), dict(data=2, zero=3), dict(tensor=2), dict(data=2, zero=1))
        ),
    ],
    ids=str,
)
def test_parameters_that_are_thawed_are_told(tmp_path: Path, world: int, parallel: dict[str, Any]) -> None:
    """Told by one rank, whichever ranks have them."""
    first, *others = run_ranks(world, train_others, tmp_path, parallel, with_context=False)
    for name, (_, _, starts) in TRAINED.items():
        assert [line[: len(start)] for line, start in zip(first[name], starts, strict=True)] == starts, name
        assert not any(other[name] for other in others)
