"""Whole steps with parameter servers, on CUDA devices that do not exist."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.fake_cuda import Waits, batch_on_device, files_of, run_fake_ranks
from helpers.training import BATCH, batch_of, config_of
from torch import Tensor

import colossus
from colossus.data_parallel.servers import server_parameters
from colossus.server.rpc_client import Handle


class Echo:
    """Stands for `Servers`: all is done at once, and all that is sent is on the host."""

    num_servers = 2

    def create(self, tensors: Mapping[str, Tensor], **options: Any) -> Handle[None]:
        assert {x.device.type for x in tensors.values()} <= {"cpu", "meta"}
        return done(None)

    def push(self, values: Mapping[str, Any], rule: str, **options: Any) -> Handle[dict[str, int | None]]:
        require_on_host(values)
        return done(dict.fromkeys(values, 0))

    def pull(self, into: Mapping[str, Tensor]) -> Handle[None]:
        require_on_host(into)
        return done(None)

    def accumulate(self, step: int, values: Mapping[str, Any]) -> Handle[None]:
        require_on_host(values)
        return done(None)

    def squares(self, step: int, names: list[str]) -> Handle[dict[str, float]]:
        return done(dict.fromkeys(names, 1.0))

    def apply(self, step: int, names: Any, *, into: Mapping[str, Tensor] = {}, **options: Any) -> Handle[None]:
        require_on_host(into)
        return done(None)

    def clock(self, step: int, max_staleness: int) -> Handle[None]:
        return done(None)

    def wait_or_name_missing(self, handle: Handle[Any], seconds: float) -> Any:
        return handle.wait()

    def close(self, patience_seconds: float | None = None) -> None:
        pass


def done(result: Any) -> Handle[Any]:
    return Handle((), lambda replies: result)


def require_on_host(values: Mapping[str, Any]) -> None:
    for value in values.values():
        assert value is None or value.device.type == "cpu", value


def steps(rank: int, strategies: list[dict[str, Any]]) -> list[list[dict[str, int]]]:
    server_parameters.connect = lambda *args: SimpleNamespace(servers=Echo(), close=lambda: None)  # type: ignore[assignment]
    found = []
    for strategy in strategies:
        plan = dict(data=2, strategy=dict(type="server", **strategy))
        engine = colossus.initialize(config_of(plan, 9, "fp32", device="cuda", model=dict(num_layers=1)))
        batch = batch_on_device({key: x[: BATCH // 2] for key, x in batch_of(0).items()})
        of_steps = []
        for _ in range(4):
            Waits.begin_step()
            with Waits(allowed=True) as waits:
                engine.train_step(batch)
            of_steps.append(files_of(waits.found))
        assert {x.device.type for x in engine.model.parameters()} == {"cuda"}
        engine.close()
        found.append(of_steps[1:])
    return found


HOST_READ, SKIPPED = "gradients/host_transfer.py", "data_parallel/strategy.py"
NUM_GRADIENTS = 20
CASES: list[tuple[dict[str, Any], dict[str, int]]] = [
    (dict(mode="sync"), {HOST_READ: NUM_GRADIENTS, "data_parallel/servers/sync.py": 2}),  # the scale, and whether
    (dict(mode="async"), {HOST_READ: NUM_GRADIENTS, SKIPPED: 1}),
    (dict(mode="async", algorithm="downpour"), {HOST_READ: NUM_GRADIENTS, SKIPPED: 1}),
    (dict(mode="async", algorithm="easgd"), {HOST_READ: NUM_GRADIENTS}),
]


@pytest.mark.long
def test_a_step_waits_for_its_gradients_and_for_no_pull() -> None:
    """Each gradient is waited for by an event of its own, once all of them are on their way."""
    (found,) = run_fake_ranks(2, steps, [strategy for strategy, _ in CASES])
    assert found == [[waits] * 3 for _, waits in CASES]
