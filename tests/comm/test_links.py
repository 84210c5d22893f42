"""Point-to-point links: order, back pressure, big and empty messages, and what is said when the other end fails."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from typing import Any

import pytest
import torch
from helpers import on_host
from helpers.ranks import RankError, grid, run_ranks
from torch import Tensor

from colossus.comm import accounting, links, log, shared_memory
from colossus.comm.links import Links
from colossus.context.parallel_context import ParallelContext

PAIRS = [(0, 1), (1, 0)]


def linked(context: ParallelContext) -> Links:
    return Links(context.group("pipeline"), PAIRS, torch.device("cpu"))


def run(body: Any, *args: Any, **options: Any) -> list[Any]:
    return run_ranks(2, body, *args, plan=grid(pipeline=2), **options)


def message(number: int) -> list[Tensor]:
    """Tensors of several shapes and dtypes; some messages are empty."""
    if number % 7 == 3:
        return []
    generator = torch.Generator().manual_seed(number)
    rows = 1 + number * 37 % 211
    return [
        torch.randn(rows, 13, generator=generator, dtype=torch.float64),
        torch.randint(0, 9, (3, rows), generator=generator).t(),  # not contiguous
        torch.rand(0, 4),
        torch.rand(5, generator=generator) > 0.5,
        torch.tensor(float(number)),
    ]


def _both_ways(context: ParallelContext, ring_bytes: int, shared: bool) -> None:
    """Both ranks send far more than fits before they receive: whoever must wait takes first what is due to it."""
    links._BUFFER_BYTES = ring_bytes
    shared_memory.enable(shared)
    link, other = linked(context), 1 - context.rank
    assert link.takes_early is not shared
    coming: deque[Any] = deque()
    waits = []
    for number in range(60):
        coming.append(link.receive(other, message(1000 * other + number), f"message {number}"))
        mine = message(1000 * context.rank + number)
        waits.append(link.send(other, mine, f"message {number}"))
    for number, incoming in enumerate(coming):
        for got, wanted in zip(incoming.wait(), message(1000 * other + number), strict=True):
            assert torch.equal(got, wanted)
    for wait in waits:
        wait()


@pytest.mark.parametrize(("ring_bytes", "shared"), [(64 << 10, True), (32 << 20, True), (64 << 10, False)])
def test_messages_arrive_whole_and_in_order(ring_bytes: int, shared: bool) -> None:
    run(_both_ways, ring_bytes, shared)


def _both_ways_through_the_host(context: ParallelContext, shared: bool) -> None:
    staged = on_host.pretend()
    _both_ways(context, 64 << 10, shared)
    assert min(staged.copies, staged.returned) > 200
    link = linked(context)
    if context.rank:
        link.send_object(0, {"a": 1}, "object")
    else:
        assert link.receive_object(1, "object") == {"a": 1}


@pytest.mark.parametrize("shared", [True, False])
def test_messages_of_a_device_go_through_the_host_under_gloo(shared: bool) -> None:
    run(_both_ways_through_the_host, shared)


def _awaited_out_of_order(context: ParallelContext) -> None:
    link, other = linked(context), 1 - context.rank
    for number in range(30):
        link.send(other, [torch.full((9,), float(number))], "number")
    coming = [link.receive(other, [torch.empty(9)], "number") for _ in range(30)]
    for number in (29, 3, 17, 0, *range(30)):
        assert torch.equal(coming[number].wait()[0], torch.full((9,), float(number)))


def test_a_later_message_may_be_wanted_first() -> None:
    run(_awaited_out_of_order)


def _larger_than_the_ring(context: ParallelContext) -> None:
    links._BUFFER_BYTES = 64 << 10
    link, other = linked(context), 1 - context.rank
    sizes = [10, 40_000, 10, 8_000, 50_000]
    coming = [link.receive(other, [torch.empty(size)], f"{size}") for size in sizes]
    waits = [link.send(other, [torch.full((size,), float(size))], f"{size}") for size in sizes]
    for incoming, size in zip(coming, sizes, strict=True):
        assert torch.equal(incoming.wait()[0], torch.full((size,), float(size)))
    for wait in waits:
        wait()


def test_a_message_larger_than_the_ring_goes_another_way() -> None:
    run(_larger_than_the_ring)


def test_more_small_messages_than_a_socket_holds() -> None:
    def body(context: ParallelContext) -> None:
        link = linked(context)
        for number in range(500):
            if context.rank == 0:
                link.send(1, [torch.tensor([number])], "number")
            else:
                assert link.receive(0, [torch.empty(1, dtype=torch.int64)], "number").wait()[0].item() == number

    run(body)


def _other_size(context: ParallelContext) -> None:
    link = linked(context)
    if context.rank == 0:
        link.send(1, [torch.ones(100)], "activation")
        time.sleep(0.5)
    else:
        link.receive(0, [torch.empty(200)], "activation of microbatch 3").wait()


def test_a_message_of_another_size_is_told() -> None:
    words = r"rank 0 sent something else \(448 bytes\) where the activation of microbatch 3 \(832 bytes\) is due"
    with pytest.raises(RankError, match=words):
        run(_other_size)


def _other_step(context: ParallelContext) -> None:
    link = linked(context)
    if context.rank == 0:
        link.send(1, [torch.ones(100)], "activation of microbatch 3", key=(4, "batch"))
        time.sleep(0.5)
    else:
        link.receive(0, [torch.empty(100)], "activation of microbatch 3", key=(5, "batch")).wait()


def test_a_message_of_another_step_is_told() -> None:
    with pytest.raises(RankError, match=r"rank 0 sent something else .* where the activation of microbatch 3"):
        run(_other_step)


def _killed(context: ParallelContext, sending: bool) -> None:
    links._BUFFER_BYTES = 64 << 10
    link = linked(context)
    if context.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if sending:
        for _ in range(50):
            link.send(0, [torch.ones(4_000)], "gradient")
    link.receive(0, [torch.empty(200)], "activation").wait()


@pytest.mark.parametrize("sending", [False, True])
def test_a_killed_peer_is_noticed_at_once(sending: bool) -> None:
    since = time.monotonic()
    with pytest.raises(RankError, match="Connection closed by peer: rank 0 is gone"):
        run(_killed, sending, timeout=20)
    assert time.monotonic() - since < 15


def test_sends_are_counted_and_logged() -> None:
    def body(context: ParallelContext) -> None:
        link = linked(context)
        log.clear()
        with accounting.count() as moved:
            if context.rank == 0:
                link.send(1, [torch.ones(3, 5), torch.ones(2, dtype=torch.float64)], "activation of microbatch 0")
            else:
                like = [torch.empty(3, 5), torch.empty(2, dtype=torch.float64)]
                link.receive(0, like, "activation of microbatch 0").wait()
        assert moved.bytes("pipeline", "send") == (76 if context.rank == 0 else 0)
        (line,) = log.recent()
        assert ("send of the activation of microbatch 0 over pipeline [3x5 float32]" in line) == (context.rank == 0)
        assert line.endswith("done")

    run(body)
