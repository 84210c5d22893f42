"""Whole steps of the strategies that mix with peers, on a CUDA device that does not exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.fake_cuda import Waits, batch_on_device, files_of, run_fake_ranks
from helpers.training import BATCH, batch_of, config_of
from torch import Tensor

import colossus
from colossus.comm.host_staging import BufferPool
from colossus.comm.peers import Message
from colossus.context.groups import AxisGroup
from colossus.data_parallel.gossip import ad_psgd, gossip
from colossus.data_parallel.gossip.ad_psgd import ANSWER, REQUEST


class Mirror:
    """Stands for `PeerLinks`: whatever this replica sends, each peer sends, too, at once."""

    def __init__(self, group: AxisGroup, most_bytes: int, timeout_seconds: float, *, pinned: bool = False) -> None:
        assert pinned
        self.group, self._most_bytes = group, most_bytes
        self._pool = BufferPool(pinned=True)
        self.buffer, self.release = self._pool.take, self._pool.give_back
        self.waited_seconds, self.bytes_sent = 0.0, 0
        self._sent: dict[int, tuple[int, int, bytes]] = {}

    def send(
        self,
        to: int | list[int],
        kind: int,
        number: int,
        data: Tensor | None = None,
        meta: Any = None,
        *,
        dtype: torch.dtype = torch.uint8,
        owned: bool = False,
    ) -> None:
        size = 0
        if data is not None:
            assert data.device.type == "cpu"
            assert data.dtype is torch.uint8
            size = data.numel()
            assert size <= self._most_bytes
        self._sent[kind] = number, size, meta
        self.bytes_sent += size
        if owned and data is not None:
            self.release(data)

    def receive(
        self, source: int, kind: int, number: int, while_waiting: Callable[[], object] = lambda: None
    ) -> Message:
        # a pair's answer is of the size of the request
        _, size, meta = self._sent[REQUEST if kind == ANSWER else kind]
        return Message(source, kind, number, meta, self.buffer(size))

    def take(self, kind: int) -> list[Message]:
        if kind not in self._sent:
            return []
        number, size, meta = self._sent[kind]
        others = [index for index in range(self.group.size) if index != self.group.index]
        return [Message(index, kind, number, meta, self.buffer(size)) for index in others]

    def has_come(self, kind: int) -> bool:
        return True

    def lost(self, source: int) -> None:
        pass

    def name(self, index: int) -> str:
        return f"replica {index}"

    def close(self) -> None:
        pass


def steps(rank: int, strategies: list[dict[str, Any]]) -> list[list[dict[str, int]]]:
    """Of each strategy and each step from the second on: file -> waits."""
    gossip.PeerLinks = Mirror  # type: ignore[misc, assignment]
    ad_psgd.ADPSGD._wait_for_all = lambda self: None  # type: ignore[method-assign]
    results = []
    for strategy in strategies:
        plan = dict(data=4, strategy=dict(strategy))
        engine = colossus.initialize(config_of(plan, 9, "bf16", device="cuda", model=dict(num_layers=1)))
        batch = batch_on_device({key: x[: BATCH // 4] for key, x in batch_of(0).items()})
        of_steps = []
        for _ in range(4):
            Waits.begin_step()
            with Waits(allowed=True) as waits:
                engine.train_step(batch)
            of_steps.append(files_of(waits.found))
        assert {x.device.type for x in engine.model.parameters()} == {"cuda"}
        engine.close()
        results.append(of_steps[1:])
    return results


SGP = dict(type="sgp")
VECTOR = "data_parallel/parameter_vector.py"
CASES: list[tuple[dict[str, Any], dict[str, int]]] = [
    (SGP, {VECTOR: 2}),  # what is sent, and what is taken in
    (SGP | dict(overlap=1), {VECTOR: 1, "data_parallel/gossip/push_sum.py": 1}),
    (dict(type="d-psgd"), {VECTOR: 2}),
    (dict(type="ad-psgd"), {VECTOR: 2}),
]


@pytest.mark.long
def test_a_step_waits_once_for_each_message() -> None:
    strategies = [strategy for strategy, _ in CASES]
    first, second = run_fake_ranks(4, steps, strategies, ranks=(0, 1))
    expected = [[waits] * 3 for _, waits in CASES]
    assert first == expected
    # of a pair the second is passive: it sends nothing by itself, and makes known what its parameters are now
    assert second == [*expected[:-1], [{VECTOR: 1}] * 3]
