"""What is refused before a process starts of sums in two levels, compressed sums, and averages in rounds."""

from __future__ import annotations

from typing import Any

import pytest

from colossus.config import ConfigError, load_config
from colossus.config.plans import strategy_options

BASE: dict[str, Any] = dict(
    model=dict(type="GPT", num_layers=2, hidden_size=24, num_heads=4, vocab_size=53, seq_len=12),
    train=dict(steps=50, global_batch_size=12),
)


def config_of(strategy: dict[str, Any], data: int = 4, **more: Any) -> Any:
    parallel = {"data": data, "strategy": strategy, **more.pop("parallel", {})}
    train = {**BASE["train"], **more.pop("train", {})}
    return load_config({**BASE, "parallel": parallel, "train": train}, nproc=data)


@pytest.mark.parametrize(
    ("strategy", "more", "told"),
    [
        (dict(type="local_sgd", period=0), {}, "parallel.strategy.period"),
        (dict(type="local_sgd", perod=3), {}, "period"),
        (dict(type="slowmo", slow_momentum=1.0), {}, "parallel.strategy.slow_momentum"),
        (dict(type="diloco", outer_lr=0.0), {}, "parallel.strategy.outer_lr"),
        (dict(type="all_reduce", compress="bf61"), {}, "'bf16' or 'powersgd'"),
        (dict(type="all_reduce", compress="powersgd", rank=0), {}, "parallel.strategy.rank"),
        (dict(type="all_reduce", compress="bf16", rank=2), {}, "it is for 'powersgd'"),
        (dict(type="all_reduce", compress="powersgd", min_compression_rate=-1.0), {}, "min_compression_rate"),
        (
            dict(type="all_reduce", compress="bf16"),
            dict(train=dict(precision=dict(compute="bf16", reduce="bf16"))),
            "summed in bf16 already",
        ),
        (dict(type="hierarchical", per_host=3), {}, "does not divide data 4: each host has as many data ranks; use 1"),
        (dict(type="hierarchical", hosts=8), {}, "does not divide data 4"),
        (dict(type="hierarchical", hosts=2, per_host=1), {}, "hosts and per_host say the same"),
        (dict(type="hierarchical", hosts=0), {}, "parallel.strategy.hosts"),
        (dict(type="hierarchical"), dict(parallel=dict(zero=2)), "give hosts= (as --nnodes) or per_host="),
        (dict(type="hierarchical", hosts=8), dict(parallel=dict(zero=2)), "does not divide data 4"),
        (
            dict(type="hierarchical", hosts=2, compress="bf16"),
            dict(parallel=dict(zero=2)),
            "ZeRO's sums are not compressed",
        ),
        (dict(type="local_sgd"), dict(parallel=dict(zero=1)), "both say what data ranks do"),
        (dict(type="all_reduce"), dict(parallel=dict(zero=1)), "both say what data ranks do"),
    ],
)
def test_what_does_not_fit_is_told(strategy: dict[str, Any], more: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(strategy, **more)
    assert told in str(caught.value)


@pytest.mark.parametrize("options", [dict(hosts=2), dict(per_host=2)])
def test_zero_inside_of_hosts_is_over_their_ranks(options: dict[str, Any]) -> None:
    config = config_of(dict(type="hierarchical", **options), parallel=dict(zero=3))
    assert config.parallel.zero.shard == 2
    assert config.parallel.data_strategy["type"] == "zero"


@pytest.mark.parametrize(
    ("strategy", "data", "promise"),
    [
        (dict(type="all_reduce"), 4, ""),
        (dict(type="all_reduce", compress="bf16"), 4, "inexact: gradients travel as bf16; replicas stay equal"),
        (dict(type="all_reduce", compress="bf16"), 1, ""),
        (dict(type="hierarchical", hosts=2), 4, "hosts of 2 data ranks"),
        (dict(type="diloco"), 4, "inexact: each replica has parameters of its own, averaged every 30 steps"),
    ],
)
def test_what_is_inexact_says_so(strategy: dict[str, Any], data: int, promise: str) -> None:
    options = strategy_options(config_of(strategy, data))
    assert options is not None
    assert options.describe(data) == promise
