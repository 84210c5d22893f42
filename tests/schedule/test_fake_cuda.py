"""Pipelines on CUDA devices that do not exist: every schedule, with what weights and activations may do in a step; and
products of all axes in worlds of up to 512 ranks. No tensor is on the wrong device, and the host waits for nothing."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.fake_cuda import Waits, batch_on_device, run_fake_ranks
from helpers.training import batch_of, config_of

import colossus

SMALL = dict(num_layers=2, hidden_size=16, num_heads=2, vocab_size=30, seq_len=8)
FOUR = dict(num_layers=4)


def config(parallel: dict[str, Any], precision: str = "bf16", samples: int = 4, **more: Any) -> dict[str, Any]:
    more["model"] = {**SMALL, **more.pop("model", {})}
    more["train"] = {"global_batch_size": samples, **more.pop("train", {})}
    return config_of(parallel, 9, precision, device="cuda", **more)


def waits_of(settings: dict[str, Any], model: Any = None) -> list[str]:
    """What waits in a step that follows a first one."""
    sizes, samples = settings["model"], settings["train"]["global_batch_size"]
    if model is not None:
        settings = {key: value for key, value in settings.items() if key != "model"}
    engine = colossus.initialize(settings, model)
    batch = batch_on_device(batch_of(0, sizes, samples // engine.context.size("data")))
    engine.train_step(batch)
    with Waits(allowed=True) as waits:
        engine.train_step(batch)
    engine.eval_step(batch)
    engine.close()
    return waits.found


def schedule(kind: str, microbatches: int = 2) -> dict[str, Any]:
    return dict(type=kind, microbatches=microbatches)


#: embeddings are tied but where it says otherwise
PIPELINES: dict[str, dict[str, Any]] = {
    "gpipe": config(dict(pipeline=2), "fp16", schedule=schedule("gpipe")),
    "1f1b": config(dict(pipeline=2), train=dict(activation_checkpoint="full"), schedule=schedule("1f1b")),
    "interleaved": config(dict(pipeline=2), "fp32", model=dict(FOUR, dropout=0.1), schedule=schedule("interleaved")),
    "zb-h1": config(dict(pipeline=2), train=dict(activation_checkpoint="selective"), schedule=schedule("zb-h1")),
    "zb-v": config(dict(pipeline=2), model=dict(FOUR, tie_embeddings=False), schedule=schedule("zb-v")),
}


def run_all(rank: int, cases: list[dict[str, Any]]) -> list[list[str]]:
    return [waits_of(case) for case in cases]


@pytest.mark.long
@pytest.mark.parametrize("kinds", [("1f1b", "interleaved", "zb-v"), ("gpipe", "zb-h1")])
def test_schedules_wait_for_nothing(kinds: tuple[str, ...]) -> None:
    cases = [PIPELINES[kind] for kind in kinds]
    assert run_fake_ranks(2, run_all, cases, ranks=(0, 1)) == [[[]] * len(cases)] * 2


@pytest.mark.long
@pytest.mark.parametrize("kind", PIPELINES)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_schedule_in_every_way(kind: str, precision: str) -> None:
    cases = [
        config(
            dict(pipeline=4),
            precision,
            samples=8,
            model=dict(num_layers=8, dropout=0.1, tie_embeddings=is_tied),
            train=dict(activation_checkpoint=recompute),
            schedule=schedule(kind, 8),
        )
        for recompute in ("none", "full", "selective")
        for is_tied in (True, False)
    ]
    assert run_fake_ranks(4, run_all, cases, ranks=range(4)) == [[[]] * len(cases)] * 4


# -- big worlds --------------------------------------------------------------------------------------------------------

#: world, plan, more of the config
PRODUCTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "64: data 8 x pipeline 2 x 2d": (
        64,
        dict(data=8, pipeline=2, tensor=dict(mode="2d", size=4)),
        dict(samples=32, schedule=schedule("1f1b")),
    ),
    "128: zero x pipeline x ring x 1d": (
        128,
        dict(data=8, pipeline=2, sequence=dict(size=4, mode="ring"), tensor=2, zero=1),
        dict(samples=16, schedule=schedule("zb-h1")),
    ),
    "256: data x pipeline x 2.5d": (
        256,
        dict(data=16, pipeline=2, tensor=dict(mode="2.5d", size=8, depth=2)),
        dict(samples=128, schedule=schedule("interleaved"), model=FOUR),
    ),
    "512: data x pipeline x ring x 3d": (
        512,
        dict(data=16, pipeline=2, sequence=dict(size=2, mode="ring"), tensor=dict(mode="3d", size=8)),
        dict(samples=128, schedule=schedule("1f1b")),
    ),
    "512: data x hybrid x 1d": (
        512,
        dict(data=32, sequence=dict(size=4, mode="hybrid"), tensor=dict(size=4, sequence_sharded=True)),
        dict(samples=32, model=dict(num_heads=8, hidden_size=32, seq_len=16)),
    ),
    "512: zero 3 x ulysses": (
        512,
        dict(data=256, sequence=dict(size=2, mode="ulysses"), zero=3),
        dict(samples=256),
    ),
    "512: data x pipeline 4 x 3d": (
        512,
        dict(data=16, pipeline=4, tensor=dict(mode="3d", size=8)),
        dict(samples=256, model=dict(num_layers=8), schedule=schedule("zb-v", 4)),
    ),
}


def one(rank: int, settings: dict[str, Any]) -> list[str]:
    return waits_of(settings)


@pytest.mark.long
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_all_axes_wait_for_nothing(name: str) -> None:
    world, parallel, more = PRODUCTS[name]
    size = parallel.get("pipeline", 1)
    ranks = range(world // size - 1, world, world // size)  # the last of each stage
    assert run_fake_ranks(world, one, config(parallel, **more), ranks=ranks) == [[]] * size


# -- mistakes of a user's own ------------------------------------------------------------------------------------------
