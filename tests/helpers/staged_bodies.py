"""Bodies of two ranks that exchange tensors of a device: every collective, messages, and the order of events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from colossus.comm import collectives, objects, shared_memory, uneven
from colossus.comm.links import Links
from colossus.context.grid import RankGrid
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext

WORLD = 2
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)
#: numbers of a buffer, 1 MB; number of buffers that are written over
SIZE, COUNT = 1 << 18, 8
#: cycles for which a stream sleeps: some 50 ms
CYCLES = 100_000_000

Body = Callable[[AxisGroup, torch.device], None]


def run_body(rank: int, device: torch.device, body: Body, shared: bool) -> None:
    """Run ``body(group, device)`` on a rank, with a group of all ranks."""
    shared_memory.enable(shared)
    sizes = {"pipeline": 1, "data": 1, "sequence": 1, "tensor": WORLD}
    grid = RankGrid(sizes, {name: (name,) for name in sizes})
    context = ParallelContext(grid, rank, device=device, backend="gloo")
    try:
        body(context.group("tensor"), device)
    finally:
        context.close()
        shared_memory.enable(True)


def every_collective(group: AxisGroup, device: torch.device) -> None:
    """Compare each collective, in each dtype, of dense and strided tensors, with what it means."""
    me = group.index
    for dtype in DTYPES:
        of_rank = [(torch.arange(24).view(4, 6) % 7 + rank).to(dtype) for rank in range(WORLD)]
        total = sum(of_rank[1:], of_rank[0])
        for x in (of_rank[me].to(device), of_rank[me].t().contiguous().to(device).t()):
            require(collectives.all_reduce(x, group).wait(), total, "all_reduce")
            require(collectives.all_reduce(x, group, op="max").wait(), of_rank[-1], "all_reduce of the maximum")
            require(x, of_rank[me], "the input of all_reduce")
            copy = x.clone()
            require(collectives.all_reduce(copy, group, owned=True).wait(), total, "all_reduce in place")
            for dim in (0, 1):
                require(collectives.all_gather(x, group, dim).wait(), torch.cat(of_rank, dim), "all_gather")
                scattered = collectives.reduce_scatter(x, group, dim).wait()
                require(scattered, total.chunk(WORLD, dim)[me], "reduce_scatter")
            exchanged = torch.cat([y.chunk(WORLD, 1)[me] for y in of_rank], 0)
            require(collectives.all_to_all(x, group, 1, 0).wait(), exchanged, "all_to_all")
            require(collectives.broadcast(x.contiguous().clone(), group, 1), of_rank[1], "broadcast")
        rows = of_rank[me].to(device)
        table = [[1, 3], [2, 2]]
        lengths, _ = uneven.agree(table[me], group, device)
        wanted = torch.cat([y.split(table[rank])[me] for rank, y in enumerate(of_rank)])
        require(uneven.all_to_all(rows, lengths, group).wait(), wanted, "all_to_all of uneven parts")
        parts = [y[: rank + 1] for rank, y in enumerate(of_rank)]
        gathered = uneven.all_gather(parts[me].to(device), [1, 2], group).wait()
        require(gathered, torch.cat(parts), "all_gather of uneven parts")
    assert objects.all_gather_object({"rank": me}, group) == [{"rank": rank} for rank in range(WORLD)]


def messages(group: AxisGroup, device: torch.device) -> None:
    """Send lists of tensors both ways, and an object."""
    other = 1 - group.index
    links = Links(group, [(0, 1), (1, 0)], device)
    sent = [numbers(device, group.index), torch.tensor(True, device=device), torch.empty(0, 3, device=device)]
    for number in range(4):
        incoming = links.receive(other, sent, f"message {number}")
        wait = links.send(other, sent, f"message {number}")
        received = incoming.wait()
        wait()
        require(received[0], numbers(torch.device("cpu"), other), "a message")
        assert received[1].item() is True
        assert received[2].shape == (0, 3)
        assert all(tensor.device == device for tensor in received)
    if group.index:
        links.send_object(0, {"a": 1}, "object")
    else:
        assert links.receive_object(1, "object") == {"a": 1}
    links.close()


def numbers(device: torch.device, seed: int) -> Tensor:
    return torch.arange(SIZE, device=device, dtype=torch.float32) + seed


def sleep(device: torch.device) -> None:
    """Keep the current stream of a CUDA device busy."""
    if device.type == "cuda":
        torch.cuda._sleep(CYCLES)


def total_of_all(seed: int) -> Tensor:
    return sum(
        (numbers(torch.device("cpu"), seed + rank) for rank in range(1, WORLD)), numbers(torch.device("cpu"), seed)
    )


def what_is_sent_is_there(group: AxisGroup, device: torch.device) -> None:
    """Send a tensor that the device has yet to compute, and change it once the collective is started."""
    x = torch.zeros(SIZE, device=device)
    sleep(device)
    x.add_(numbers(device, group.index))
    pending = collectives.all_reduce(x, group)
    x.fill_(torch.nan)
    require(pending.wait(), total_of_all(0), "the sum")
    links = Links(group, [(0, 1), (1, 0)], device)
    incoming = links.receive(1 - group.index, [x], "message")
    sleep(device)
    x.copy_(numbers(device, group.index))
    wait = links.send(1 - group.index, [x], "message")
    require(incoming.wait()[0], numbers(torch.device("cpu"), 1 - group.index), "the message")
    wait()
    links.close()


def what_comes_back_is_read_first(group: AxisGroup, device: torch.device) -> None:
    """Let the copy back wait behind a stream that sleeps, while the memory of the host is asked for again."""
    for owned in (False, True):
        pending = [collectives.all_reduce(numbers(device, group.index + seed), group, owned=owned) for seed in range(4)]
        sleep(device)
        sums = [one.wait() for one in pending]
        pending.clear()
        overwritten = [torch.full((SIZE,), torch.nan, pin_memory=device.type == "cuda") for _ in range(COUNT)]
        for seed, total in enumerate(sums):
            require(total, total_of_all(seed), f"sum {seed}")
        del overwritten


def another_stream_waits_for_it(group: AxisGroup, device: torch.device) -> None:
    """Start a sum on one stream and wait for it on another that is behind."""
    x = numbers(device, group.index)
    sleep(device)
    x.mul_(2)
    pending = collectives.all_reduce(x, group)
    if device.type == "cuda":
        side = torch.cuda.Stream(device)
        with torch.cuda.stream(side):
            sleep(device)
            doubled = pending.wait() * 2
        torch.cuda.current_stream(device).wait_stream(side)
    else:
        doubled = pending.wait() * 2
    require(doubled, total_of_all(0) * 4, "the sum")


BODIES: dict[str, Body] = {"every collective": every_collective, "messages": messages}
ORDERED: dict[str, Body] = {
    "what is sent is there": what_is_sent_is_there,
    "what comes back is read first": what_comes_back_is_read_first,
    "another stream waits for it": another_stream_waits_for_it,
}


def require(tensor: Any, expected: Tensor, name: str) -> None:
    wrong = 0 if torch.equal(tensor.cpu(), expected) else (tensor.cpu() != expected).sum().item()
    assert torch.equal(tensor.cpu(), expected), (
        f"{name} of {expected.dtype} has {wrong} wrong of {expected.numel()} numbers"
    )
