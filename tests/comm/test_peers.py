"""Links between replicas: what is sent comes whole, nobody waits to send, strangers and deaths are seen."""

from __future__ import annotations

import os
import signal
import time
import warnings

import pytest
import torch
from helpers.ranks import grid, run_ranks

from colossus.comm import accounting
from colossus.comm.objects import all_gather_object
from colossus.comm.peer_gone import PeerGone
from colossus.comm.peers import PeerLinks
from colossus.context.local_ranks import run_local_ranks
from colossus.context.parallel_context import ParallelContext

MOST = 1 << 23


def _exchange(context: ParallelContext) -> dict[str, object]:
    group = context.group("data")
    links, me = PeerLinks(group, MOST, 20.0), group.index
    others = [index for index in range(group.size) if index != me]
    sizes = [0, 1, 12345, 4 << 20]
    with accounting.count() as moved:
        for number, size in enumerate(sizes):
            data = links.buffer(size)
            data.fill_(me * 16 + number)
            links.send(others, 3, number, data, me + 0.5, owned=True)
    are_whole = []
    for source in reversed(others):
        for number in (3, 0, 2, 1):  # in any order
            message = links.receive(source, 3, number)
            right = message.data.numel() == sizes[number] and bool((message.data == source * 16 + number).all())
            are_whole.append(right and message.meta == source + 0.5)
            links.release(message.data)
    again = links.buffer(12345)
    links.send((me + 1) % group.size, 4, 7, again)
    messages = []
    while not messages:
        time.sleep(0.002)
        messages = links.take(4)
    links.close()
    return dict(
        whole=are_whole,
        sent=links.bytes_sent,
        counted=moved.bytes("data", "send"),
        took=[(m.source, m.number) for m in messages],
    )


def test_messages_of_any_size_come_whole_between_all() -> None:
    for index, result in enumerate(run_ranks(3, _exchange, plan=grid(data=3))):
        assert result["whole"] == [True] * 8
        assert result["counted"] == 2 * (1 + 12345 + (4 << 20))
        assert result["sent"] == result["counted"] + 12345
        assert result["took"] == [((index - 1) % 3, 7)]


def _large(context: ParallelContext) -> str:
    """A message of more bytes than there can be ends what comes from its sender, and is told."""
    links = PeerLinks(context.group("data"), 1000, 10.0)
    other = 1 - context.group("data").index
    if other == 1:
        links.send(other, 1, 1, torch.zeros(1001, dtype=torch.uint8))
    with pytest.raises(PeerGone) as caught:
        links.receive(other, 1, 1)
    links.close()
    return str(caught.value)


def test_a_message_that_is_too_large_is_none_of_ours() -> None:
    _, text = run_ranks(2, _large, plan=grid(data=2))
    assert "a message of 1001 bytes, where at most 1000 are expected" in text


def _death(rank: int, sends_first: bool) -> str:
    context = ParallelContext(grid(data=3), rank)
    links = PeerLinks(context.group("data"), MOST, 30.0)
    all_gather_object(0, context.group("data"))
    if rank == 2:
        if sends_first:
            links.send([0, 1], 1, 0, torch.ones(MOST, dtype=torch.uint8))
            while links._streams[0]._queue or links._streams[1]._queue:
                time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    if sends_first:
        assert links.receive(2, 1, 0).data.sum().item() == MOST  # what it had sent before comes
    else:
        links.send(2, 1, 0, torch.ones(10, dtype=torch.uint8))
        time.sleep(0.2)
        links.send(2, 1, 1, torch.ones(10, dtype=torch.uint8))
    with pytest.raises(PeerGone) as caught:
        links.receive(2, 1, 1)
    links.send(1 - rank, 1, 5)  # the living go on
    assert links.receive(1 - rank, 1, 5).source == 1 - rank
    links.close()
    return str(caught.value)


@pytest.mark.parametrize("sends_first", [True, False])
def test_a_death_is_told_to_who_waits_and_the_others_go_on(sends_first: bool) -> None:
    from colossus.context.local_ranks import RanksFailed

    with pytest.raises(RanksFailed) as failed:
        run_local_ranks(3, lambda rank: _death(rank, sends_first), patience=30.0, collective_timeout=30.0)
    assert dict(failed.value.exit_codes) == {2: -9}, failed.value.tracebacks
    assert not failed.value.tracebacks


def _early_end(context: ParallelContext) -> int:
    """The first rank sends all and ends, while the others still send to it and read."""
    group = context.group("data")
    links, me = PeerLinks(group, MOST, 10.0), group.index
    others = [index for index in range(group.size) if index != me]
    for number in range(20):
        links.send(others, 1, number, torch.full((100_000,), number, dtype=torch.uint8))
        if me == 0:
            continue
        time.sleep(0.01)
    if me == 0:
        links.close()
        return 0
    total = sum(int(links.receive(0, 1, number).data[0]) for number in range(20))
    assert links._lost.keys() == links._departed
    links.close()
    return total


def test_a_rank_that_ends_early_has_not_died() -> None:
    with warnings.catch_warnings():
        assert run_ranks(3, _early_end, plan=grid(data=3)) == [0, 190, 190]
