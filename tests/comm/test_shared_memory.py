"""Collectives through shared memory: who may use it, what it refuses, and what happens when a peer is gone."""

from __future__ import annotations

import itertools
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import RankError, run_ranks
from helpers.segments import OWN_SLOT_BYTES
from torch import Tensor

from colossus.comm import collectives, shared_memory
from colossus.comm.peer_gone import PeerGone
from colossus.comm.shared_memory import channel_for
from colossus.context.parallel_context import ParallelContext

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="shared memory is used on Linux only")


@pytest.fixture(autouse=True)
def own_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of forked ranks, too."""
    monkeypatch.setattr(shared_memory, "SLOT_BYTES", OWN_SLOT_BYTES)


def _sum(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_parts_come_in_group_order_and_slots_are_not_overwritten_early(world: int) -> None:
    def body(context: ParallelContext) -> None:
        group = context.group("tensor")
        channel = channel_for(torch.zeros(1), group)
        assert channel is not None
        for turn in range(60):
            if (turn + context.rank) % world == 0:
                time.sleep(0.002)  # ranks come and go in another order each time
            mine = torch.full((1 + turn * 37,), float(turn * 10 + context.rank))
            waiting = channel._share(mine, lambda parts: torch.stack(parts).clone())
            mine.fill_(-1.0)  # what was shown has been copied
            stacked = waiting.wait()
            expected = torch.tensor([float(turn * 10 + rank) for rank in group.ranks])[:, None]
            assert torch.equal(stacked, expected.expand_as(stacked))

    run_ranks(world, body)


def test_what_does_not_fit_a_slot_goes_another_way() -> None:
    def body(context: ParallelContext) -> None:
        group = context.group("tensor")
        big = torch.ones(OWN_SLOT_BYTES // 4 + 1)
        assert channel_for(big, group) is None
        assert channel_for(torch.ones(3, dtype=torch.complex64), group) is None
        assert channel_for(torch.ones(OWN_SLOT_BYTES // 4), group) is not None
        assert (collectives.all_reduce(big, group).wait() == 2.0).all()

    run_ranks(2, body)


def test_every_rank_falls_back_when_one_cannot_map(monkeypatch: pytest.MonkeyPatch) -> None:
    real = shared_memory._map

    def body(context: ParallelContext, broken: str) -> float:
        if broken == "map" and context.rank == 1:
            shared_memory._map = _fails
        if broken == "allocate" and context.rank == 0:
            shared_memory._allocate = lambda parts, most: None
        if broken == "bind" and context.rank == 1:
            socket.socket.bind = _fails
        if broken == "disabled":
            shared_memory.enable(False)
        group = context.group("tensor")
        assert channel_for(torch.ones(1), group) is None
        return collectives.all_reduce(torch.ones(5), group).wait().sum().item()

    for broken in ("map", "allocate", "bind", "disabled"):
        assert run_ranks(3, body, broken) == [15.0] * 3
    assert shared_memory._map is real


def _fails(*arguments: Any) -> Any:
    raise OSError("no such file")


def shared_files() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("colossus-")}


def test_nothing_is_left_when_a_peer_dies_while_groups_are_made() -> None:
    def body(context: ParallelContext) -> set[str]:
        real, calls = shared_memory.all_gather_object, itertools.count(1)

        def exchange(value: Any, group: Any) -> Any:
            if context.rank == 1 and next(calls) == 2:
                os._exit(9)
            return real(value, group)

        before = shared_files()
        shared_memory.all_gather_object = exchange
        with pytest.raises(RuntimeError):
            channel_for(torch.ones(1), context.group("tensor"))
        return {name for name in shared_files() - before if Path(tempfile.gettempdir(), name, "0").exists()}

    with pytest.raises(RankError, match="died without a word") as caught:
        run_ranks(3, body)
    assert "rank 0" not in str(caught.value)


def test_ranks_that_run_different_collectives_are_told_so() -> None:
    """gloo would abort the process, or sum what does not belong together."""

    def other_size(context: ParallelContext) -> None:
        group = context.group("tensor")
        collectives.all_reduce(torch.ones(2), group).wait()
        collectives.all_reduce(torch.ones(4 if context.rank else 8), group).wait()

    with pytest.raises(RankError, match=r"rank 1 runs collective #2 .* 16 bytes of torch.float32, rank 0 .* 32 bytes"):
        run_ranks(2, other_size)

    def other_type(context: ParallelContext) -> None:
        x = torch.ones(4, dtype=torch.float32 if context.rank else torch.int32)
        waiting = collectives.all_reduce(x, context.group("tensor"))
        with pytest.raises(RuntimeError, match="do not run the same program"):
            waiting.wait()
        waiting.wait()  # no sum of what does not belong together

    with pytest.raises(RankError, match=r"torch.int32.*do not run the same program"):
        run_ranks(2, other_type)


def test_a_peer_that_dies_is_noticed_at_once() -> None:
    def body(context: ParallelContext) -> float:
        group = context.group("tensor")
        collectives.all_reduce(torch.ones(2), group).wait()
        if context.rank == 1:
            os._exit(9)
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match="Connection closed by peer: rank 1 is gone"):
            collectives.all_reduce(torch.ones(2), group).wait()
        return time.monotonic() - begin

    with pytest.raises(RankError, match="rank 1 ---\ndied without a word") as caught:
        run_ranks(2, body)
    assert "rank 0" not in str(caught.value)


def test_a_peer_that_does_not_come_is_named_after_the_timeout() -> None:
    def body(context: ParallelContext) -> None:
        group = context.group("tensor")
        channel = channel_for(torch.ones(1), group)
        assert channel is not None
        channel._share(torch.ones(1), _sum).wait()
        if context.rank == 1:
            time.sleep(1.5)
            return
        for peer in channel.peers.values():
            peer.settimeout(0.3)
        waiting = channel._share(torch.ones(1), _sum)
        with pytest.raises(PeerGone):
            waiting.wait()
        waiting.wait()  # nor is its slot read that has an old value

    with pytest.raises(RankError, match="timeout: rank 1 did not come to collective #2 within"):
        run_ranks(2, body)
