"""What is refused before a process starts of strategies whose parameters live at servers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from colossus.config import ConfigError, load_config
from colossus.config.plans import strategy_options
from colossus.launch.checks import check_model


def config_of(more: dict[str, Any], data: int = 4, **strategy: Any) -> Any:
    given = dict(
        parallel={"data": data, "strategy": dict(type="server", **strategy)},
        model=dict(type="GPT", num_layers=2, hidden_size=24, num_heads=4, vocab_size=53, seq_len=12),
        train={"steps": 50, "global_batch_size": 12, **more.pop("train", {})},
    )
    return load_config({**given, **more}, nproc=data)


@pytest.mark.parametrize(
    ("strategy", "more", "told"),
    [
        (dict(servers=0), {}, "parallel.strategy.servers"),
        (dict(server=2), {}, "did you mean parallel.strategy.servers?"),
        (dict(mode="asynch"), {}, "must be 'sync' or 'async'"),
        (dict(mode="async", max_staleness=-1), {}, "parallel.strategy.max_staleness"),
        (dict(max_staleness=2), {}, "in mode 'sync' nothing is stale"),
        (
            dict(mode="async", algorithm="downpour", push_every=4, max_staleness=3),
            {},
            "max_staleness = 3 is below push_every = 4",
        ),
        (
            dict(mode="async", algorithm="downpour", pull_every=5, max_staleness=4),
            {},
            "max_staleness = 4 is below pull_every = 5",
        ),
        (dict(algorithm="downpour"), {}, "Downpour's workers do not wait for each other; use mode='async'"),
        (dict(mode="async", push_every=3), {}, "algorithm 'sgd' pulls and pushes in each step"),
        (dict(mode="async", algorithm="easgd", pull_every=3), {}, "every push_every steps; leave it out"),
        (dict(mode="async", beta=0.5), {}, "it is for 'easgd'"),
        (dict(mode="async", algorithm="easgd", beta=1.5), {}, "parallel.strategy.beta"),
        (dict(mode="async", algorithm="easgdd"), {}, "'downpour' or 'easgd'"),
        (dict(prefetch=True), {}, "nothing is pulled ahead"),
        (dict(), dict(optimizer=dict(type=torch.optim.Rprop)), "optimizer.type = 'Rprop': the servers apply SGD"),
        (dict(), dict(comm=dict(timeout_seconds=2.9)), "comm.timeout_seconds = 2.9: a server can be taken for dead"),
        (dict(), dict(optimizer=dict(type="AdamW", amsgrad=True)), "the servers' Adam keeps no maxima"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else None,
)
def test_what_does_not_fit_is_refused_with_what_would(
    strategy: dict[str, Any], more: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(dict(more), **strategy)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        (dict(), {}),
        (dict(algorithm="easgd"), {}),
        (dict(mode="async", max_staleness=0), {}),
        (dict(mode="async", algorithm="downpour", push_every=4, max_staleness=4), {}),
        (dict(mode="async", algorithm="downpour"), dict(optimizer=dict(type=torch.optim.Rprop))),
        (dict(), dict(optimizer=dict(type=torch.optim.Adagrad))),
    ],
    ids=range(6),
)
def test_what_fits(strategy: dict[str, Any], more: dict[str, Any]) -> None:
    options = strategy_options(config_of(dict(more), servers=2, **strategy))
    assert options is not None
    assert "2 servers" in options.describe(4)


def test_zero_beside_servers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"zero = 2 and strategy = 'server' both say what data ranks do"):
        config_of(dict(parallel=dict(data=4, zero=2, strategy=dict(type="server"))))


def test_more_servers_than_rows_are_refused_before_ranks_start() -> None:
    # the largest numbers of rows: 4 * 24 of an MLP's weight
    check_model(config_of({}, servers=96))
    with pytest.raises(ConfigError, match=r"servers = 97, but .* of one is 96; use at most 96"):
        check_model(config_of({}, servers=97))
