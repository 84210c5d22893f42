"""Tables with sparse gradients under plans, against plain torch in one process: each step to 1e-10."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.long import but
from helpers.ranks import run_ranks
from helpers.tables import RULES, SAMPLES, Run, assert_same, in_torch, train

WAYS = ("dense", "gather", "owners")


def config_of(
    rule: str, way: str, clip: float | None, microbatches: int = 1, schedule: str = "1f1b", **plan: Any
) -> dict[str, Any]:
    # a table with fewer rows than ranks is not pinned to owners
    ways = {"0.small.*": "gather" if way == "owners" else way, "*": way}
    return dict(
        parallel=dict(strategy=dict(type="hybrid", ways=ways), **plan),
        optimizer=RULES[rule][0],
        schedule=dict(type=schedule, microbatches=microbatches),
        train=dict(steps=4, global_batch_size=SAMPLES, precision="fp64", clip_grad_norm=clip, seed=5),
        device="cpu",
    )


def train_all(rank: int, configs: dict[str, dict[str, Any]]) -> dict[str, Run]:
    runs = {}
    for name, config in configs.items():
        try:
            runs[name] = train(config)
        except Exception as error:
            error.add_note(f"in the case {name!r}")
            raise
    return runs


def assert_all_exact(world: int, cases: dict[str, tuple[str, float | None, dict[str, Any]]]) -> None:
    """Of name -> rule, clip, config: all on the same ranks."""
    by_rank = run_ranks(world, train_all, {name: config for name, (_, _, config) in cases.items()}, with_context=False)
    references: dict[Any, Run] = {}
    for name, (rule, clip, _) in cases.items():
        start = by_rank[0][name].weights[0]
        if (rule, clip) not in references:
            references[rule, clip] = in_torch(rule, start, clip)
        for rank, runs in enumerate(by_rank):
            assert_same(runs[name], references[rule, clip], f"{name}, rank {rank}")


@pytest.mark.parametrize("rule", but(["sgd", "momentum", "adagrad", "adam"], RULES))
def test_data_parallel_ways_are_one_process(rule: str) -> None:
    """Three ranks: no table's rows divide by them, and ``small`` has fewer."""
    cases = {}
    for way, clip, microbatches in (*((way, 0.05, 2) for way in WAYS), ("owners", None, 1)):
        config = config_of(rule, way, clip, microbatches, data=3)
        cases[f"{way}, clip {clip}, {microbatches} microbatches"] = rule, clip, config
    assert_all_exact(3, cases)


@pytest.mark.parametrize("kind", but(["selective"], ["full", "selective"]))
def test_tables_in_a_checkpointed_block_are_one_process(kind: str) -> None:
    """Recomputation looks up again, in other microbatches' backwards, too."""
    cases = {}
    for way in WAYS if kind == "selective" else ("owners",):
        config = config_of("adam", way, 0.05, 2, data=2, pipeline=2)
        config["train"]["activation_checkpoint"] = dict(type=kind, modules=["0", "3"])
        cases[f"{way}, {kind}"] = "adam", 0.05, config
    assert_all_exact(4, cases)


PRODUCTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1d": (4, dict(data=2, tensor=2)),
    "2d": (4, dict(data=1, tensor=dict(mode="2d", size=4))),
    "2.5d": (4, dict(data=1, tensor=dict(mode="2.5d", size=4, depth=1))),
    "3d": (8, dict(data=1, tensor=dict(mode="3d", size=8))),
    "1f1b": (4, dict(data=2, pipeline=2, schedule="1f1b", microbatches=3)),
    "interleaved": (4, dict(data=2, pipeline=2, schedule="interleaved", microbatches=2)),
    "zb-h1": (4, dict(data=2, pipeline=2, schedule="zb-h1", microbatches=3)),
    "1d with pipeline": (8, dict(data=2, pipeline=2, tensor=2, schedule="1f1b", microbatches=2)),
}

DEFAULT = ("2d",)


@pytest.mark.parametrize("product", but([name for name in PRODUCTS if name not in DEFAULT], PRODUCTS))
@pytest.mark.rest("2d")
def test_products_are_one_process(product: str) -> None:
    world, plan = PRODUCTS[product]
    cases = {}
    for rule, way, clip in (("rowwise_adagrad", "owners", 0.05), ("adam", "gather", None), ("momentum", "dense", 0.05)):
        cases[f"{rule}, {way}"] = rule, clip, config_of(rule, way, clip, **plan)
    assert_all_exact(world, cases)
