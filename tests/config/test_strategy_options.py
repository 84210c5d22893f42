"""What is refused before a process starts of the options of strategies, and what they say of themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from colossus.config import ConfigError, load_config
from colossus.config.plans import strategy_options


def config_of(strategy: dict[str, Any], data: int = 4, **more: Any) -> Any:
    parallel = {"data": data, "strategy": strategy, **more.pop("parallel", {})}
    train = {"steps": 50, "global_batch_size": 12, **more.pop("train", {})}
    model = dict(type="GPT", num_layers=2, hidden_size=24, num_heads=4, vocab_size=53, seq_len=12)
    return load_config(dict(model=model, parallel=parallel, train=train, **more), nproc=data)


def server(**options: Any) -> dict[str, Any]:
    return dict(type="server", **options)


@pytest.mark.parametrize(
    ("strategy", "more", "told"),
    [
        (dict(type="local_sgd", period=0), {}, "parallel.strategy.period"),
        (dict(type="slowmo", slow_momentum=1.0), {}, "parallel.strategy.slow_momentum"),
        (dict(type="diloco", outer_lr=0.0), {}, "parallel.strategy.outer_lr"),
        (dict(type="all_reduce", compress="bf61"), {}, "'bf16' or 'powersgd'"),
        (dict(type="all_reduce", compress="bf16", rank=2), {}, "it is for 'powersgd'"),
        (
            dict(type="all_reduce", compress="bf16"),
            dict(train=dict(precision=dict(compute="bf16", reduce="bf16"))),
            "summed in bf16 already",
        ),
        (dict(type="hierarchical", per_host=3), {}, "does not divide data 4: each host has as many data ranks; use 1"),
        (dict(type="hierarchical", hosts=8), {}, "does not divide data 4"),
        (dict(type="hierarchical", hosts=2, per_host=1), {}, "hosts and per_host say the same"),
        (dict(type="hierarchical"), dict(parallel=dict(zero=2)), "set hosts= (as --nnodes) or per_host="),
        (dict(type="hierarchical", hosts=8), dict(parallel=dict(zero=2)), "does not divide data 4"),
        (
            dict(type="hierarchical", hosts=2, compress="bf16"),
            dict(parallel=dict(zero=2)),
            "ZeRO's sums are not compressed",
        ),
        (dict(type="local_sgd"), dict(parallel=dict(zero=1)), "both define what data ranks do"),
        (server(servers=0), {}, "parallel.strategy.servers"),
        (server(server=2), {}, "did you mean parallel.strategy.servers?"),
        (server(max_staleness=2), {}, "in mode 'sync' nothing is stale"),
        (
            server(mode="async", algorithm="downpour", push_every=4, max_staleness=3),
            {},
            "max_staleness = 3 is below push_every = 4",
        ),
        (
            server(mode="async", algorithm="downpour", pull_every=5, max_staleness=4),
            {},
            "max_staleness = 4 is below pull_every = 5",
        ),
        (server(algorithm="downpour"), {}, "Downpour's workers do not wait for each other; use mode='async'"),
        (server(mode="async", push_every=3), {}, "algorithm 'sgd' pulls and pushes in each step"),
        (server(mode="async", beta=0.5), {}, "it is for 'easgd'"),
        (server(), dict(optimizer=dict(type=torch.optim.Rprop)), "optimizer.type = 'Rprop': the servers apply SGD"),
        (server(), dict(comm=dict(timeout_seconds=2.9)), "comm.timeout_seconds = 2.9: a silent server counts as dead"),
        (server(), dict(optimizer=dict(type="AdamW", amsgrad=True)), "the servers' Adam keeps no maxima"),
        (server(), dict(parallel=dict(zero=2)), "zero = 2 and strategy = 'server' both define what data ranks do"),
    ],
)
def test_what_does_not_fit_is_told(strategy: dict[str, Any], more: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(strategy, **more)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        (server(), {}),
        (server(algorithm="easgd"), {}),
        (server(mode="async", max_staleness=0), {}),
        (server(mode="async", algorithm="downpour", push_every=4, max_staleness=4), {}),
        (server(mode="async", algorithm="downpour"), dict(optimizer=dict(type=torch.optim.Rprop))),
        (server(), dict(optimizer=dict(type=torch.optim.Adagrad))),
    ],
)
def test_what_fits(strategy: dict[str, Any], more: dict[str, Any]) -> None:
    options = strategy_options(config_of({**strategy, "servers": 2}, **more))
    assert options is not None
    assert "2 servers" in options.describe(4)


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
