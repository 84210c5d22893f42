"""Strategies of several replicas where there is one: it trains alone, as one process does, and that is said once."""

from __future__ import annotations

import logging

import pytest
from helpers.training import assert_same_numbers, config_of, train

from colossus.data_parallel.options.strategy_options import PerReplicaOptions
from colossus.registry import STRATEGIES

#: so that two steps have a round
EVERY_STEP = {"local_sgd": {"period": 1}, "slowmo": {"period": 1}, "diloco": {"period": 1}}


def several_replicas() -> list[str]:
    """All strategies whose replicas have parameters of their own; of servers see `test_server_async`."""
    names = [name for name in STRATEGIES.names() if issubclass(STRATEGIES.options(name), PerReplicaOptions)]
    return [name for name in names if name != "server"]


@pytest.mark.parametrize("name", several_replicas())
def test_one_replica(name: str, caplog: pytest.LogCaptureFixture) -> None:
    exact = train(0, config_of({"data": 1}, 2, "fp32"), 2)
    with caplog.at_level(logging.WARNING, "colossus.engine"):
        alone = train(0, config_of({"data": 1, "strategy": {"type": name, **EVERY_STEP.get(name, {})}}, 2, "fp32"), 2)
    messages = [record.message for record in caplog.records if "parallel.data is 1" in record.message]
    assert len(messages) == 1
    if name not in ("diloco", "slowmo"):  # whose outer steps are also those of one replica
        assert_same_numbers(alone, exact)
