"""Dropout is the same under every plan: losses, every gradient and weight of one process with one microbatch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.laws import assert_parity
from helpers.long import but
from helpers.ranks import run_ranks
from helpers.training import batch_of, config_of, run_plan, shared_run

import colossus

STEPS = 3
DROPPED = dict(dropout=0.2, attention_dropout=0.1)
FOUR = dict(schedule=dict(microbatches=4))
IN_SEQUENCE = dict(model=dict(attention_dropout=0.0))
PLANS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "microbatches": (1, {}, FOUR),
    "data": (2, dict(data=2), FOUR),
    "1d": (2, dict(tensor=2), {}),
    "1d sequence sharded": (2, dict(tensor=dict(size=2, sequence_sharded=True)), {}),
    "2d": (4, dict(tensor=dict(mode="2d", size=4)), dict(schedule=dict(microbatches=2))),
    "2.5d": (8, dict(tensor=dict(mode="2.5d", size=8, depth=2)), {}),
    "3d_2x1x2": (4, dict(tensor=dict(mode="3d", shape=(2, 1, 2))), {}),
    "3d": (8, dict(tensor=dict(mode="3d", size=8)), dict(schedule=dict(microbatches=2))),
    "data, 2d": (8, dict(data=2, tensor=dict(mode="2d", size=4)), {}),
    "ring": (2, dict(sequence=dict(size=2, mode="ring")), IN_SEQUENCE),
    "ulysses, 1d sharded": (
        4, dict(sequence=dict(size=2, mode="ulysses"), tensor=dict(size=2, sequence_sharded=True)), IN_SEQUENCE
    ),
    "1f1b": (2, dict(pipeline=2), FOUR),
    "zb-h1": (2, dict(pipeline=2), dict(schedule=dict(type="zb-h1", microbatches=4))),
    "zb-v, data": (4, dict(pipeline=2, data=2), dict(schedule=dict(type="zb-v", microbatches=2))),
    "zero 3": (2, dict(data=2, zero=3), {}),
    "full checkpoint": (2, dict(data=2), dict(train=dict(activation_checkpoint="full"), **FOUR)),
    "selective checkpoint": (2, dict(tensor=2), dict(train=dict(activation_checkpoint="selective"))),
    "zb-h1, checkpoint": (
        2, dict(pipeline=2), dict(train=dict(activation_checkpoint="full"), schedule=dict(type="zb-h1", microbatches=4))
    ),
}  # fmt: skip


MODEL = dict(**DROPPED, num_layers=4)


def config(plan: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    return config_of(plan, STEPS, "fp64", **{**more, "model": {**MODEL, **more.get("model", {})}})


#: by default dropout of attention weights, which the covering array of tests/test_parity.py has not
DEFAULT = ("1d sequence sharded", "zb-h1, checkpoint")


@pytest.mark.rest("1d sequence sharded")
@pytest.mark.parametrize("name", but(PLANS.keys() - {*DEFAULT}, PLANS))
def test_every_plan_drops_what_one_process_drops(name: str) -> None:
    world, plan, more = PLANS[name]
    reference = shared_run(1, config({}, {"model": more.get("model", {})}), STEPS)[0]
    without = shared_run(1, config({}, {"model": dict(dropout=0.0, attention_dropout=0.0)}), STEPS)[0]
    assert all(abs(mine - other) > 1e-5 for mine, other in zip(reference.losses, without.losses, strict=True))
    assert_parity(run_plan(world, config(plan, more), STEPS), reference, "fp64")


def losses(
    rank: int, plan: dict[str, Any], more: dict[str, Any], steps: range, folder: Path, save: bool
) -> list[float]:
    """Of these steps, gone on from what is saved in a folder."""
    engine = colossus.initialize(config(plan, {**more, "checkpoint": dict(dir=str(folder))}))
    if steps.start:
        engine.checkpoints.load(folder)
    index, count = engine.context.index("data"), engine.context.size("data")
    found = []
    for step in steps:
        batch = {key: value.chunk(count)[index] for key, value in batch_of(step).items()}
        found.append(engine.train_step(batch).loss)
    if save:
        engine.checkpoints.save(background=False)
    engine.close()
    return found


def test_a_run_goes_on_under_another_plan(tmp_path: Path) -> None:
    (whole,) = run_ranks(1, losses, {}, {}, range(STEPS), tmp_path, False, with_context=False)
    plan = dict(data=2), FOUR
    first, *_ = run_ranks(2, losses, *plan, range(1), tmp_path, True, with_context=False)
    rest, *_ = run_ranks(2, losses, dict(pipeline=2), FOUR, range(1, STEPS), tmp_path, False, with_context=False)
    assert first + rest == pytest.approx(whole, rel=1e-10)
