"""Memory that crosses streams is not given away early: copies to the host and back, and collectives of one rank.

Each case lets the stream that reads a buffer sleep, drops the buffer, and writes over whatever memory the allocator
gives next. That this is able to fail is a case of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.section import Case, Figures, LeftOut
from colossus.layers import host_memory
from colossus.layers.host_memory import HostCopy

#: numbers of a buffer; several buffers of that size are written over
SIZE, COUNT = 1 << 20, 8
#: cycles for which a stream sleeps: some 50 ms
CYCLES = 100_000_000


def cases(device: torch.device, budget: float) -> Iterator[Case]:
    bodies = {
        "a copy without record_stream is overwritten": _unsafe,
        "a copy to the host": _to_host,
        "a copy back from the host": _from_host,
        "copies of a whole forward, fetched in reverse": _many,
        "host and device overlap": _overlap,
    }
    for name, body in bodies.items():
        yield Case(name, partial(_on_cuda, device, body))


def _on_cuda(device: torch.device, body: Any) -> Figures:
    if device.type != "cuda":
        raise LeftOut("no CUDA device: the CPU has one stream")
    figures: Figures = body(device)
    torch.cuda.synchronize()
    return figures


def numbers(device: torch.device, seed: int = 0) -> Tensor:
    return torch.arange(SIZE, device=device, dtype=torch.float32) + seed


def write_over(device: torch.device) -> list[Tensor]:
    """New tensors of the same size, on the stream that is current."""
    return [torch.full((SIZE,), torch.nan, device=device) for _ in range(COUNT)]


def _unsafe(device: torch.device) -> Figures:
    """What the cases below would see if nobody took care."""
    side = torch.cuda.Stream(device)
    x, wanted = numbers(device), numbers(device).cpu()
    host = torch.empty(SIZE, pin_memory=True)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        torch.cuda._sleep(CYCLES)
        host.copy_(x, non_blocking=True)
    del x
    kept = write_over(device)
    torch.cuda.synchronize()
    assert not torch.equal(host, wanted), "the copy is right all the same: these cases can see nothing"
    return {"buffers written over": len(kept)}


def _to_host(device: torch.device) -> Figures:
    x, wanted = numbers(device), numbers(device).cpu()
    HostCopy(x).fetch()  # makes the stream
    with torch.cuda.stream(host_memory._streams[device]):
        torch.cuda._sleep(CYCLES)
    copy = HostCopy(x)
    del x
    kept = write_over(device)
    torch.cuda.synchronize()
    assert torch.equal(copy._host, wanted), "the memory was given away before it was copied to the host"
    return {"buffers written over": len(kept)}


def _from_host(device: torch.device) -> Figures:
    """The stream of the step sleeps before it reads what came back; the copy's stream goes on with other copies."""
    wanted = numbers(device).cpu()
    copy = HostCopy(numbers(device))
    torch.cuda._sleep(CYCLES)
    back = copy.fetch()
    doubled = back * 2
    del back, copy
    with torch.cuda.stream(host_memory._streams[device]):
        kept = write_over(device)
    torch.cuda.synchronize()
    assert torch.equal(doubled.cpu(), wanted * 2), "the memory was given away before the step had read it"
    return {"buffers written over": len(kept)}


def _many(device: torch.device) -> Figures:
    """As activations of a model's blocks are: all sent, each dropped, then fetched from the last to the first."""
    copies = []
    for index in range(COUNT):
        x = numbers(device, index)
        copies.append(HostCopy(x))
        del x
    kept = write_over(device)
    for index in reversed(range(COUNT)):
        found = copies[index].fetch()
        assert torch.equal(found, numbers(device, index)), f"buffer {index} came back with other numbers"
        found.fill_(torch.nan)  # each fetch is another tensor
    return {"buffers": COUNT, "buffers written over": len(kept)}


def _overlap(device: torch.device) -> Figures:
    """Copies to the host travel while the device computes: both take hardly longer than the longer of them."""
    x, w = torch.randn(64 << 20, device=device), torch.randn(4096, 4096, device=device)

    def timed(copies: bool, products: bool) -> float:
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        held = [HostCopy(x) for _ in range(2)] if copies else []
        for _ in range(8 if products else 0):
            w @ w
        if held:
            torch.cuda.current_stream().wait_stream(host_memory._streams[device])
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    timed(True, True)
    alone, products, both = timed(True, False), timed(False, True), timed(True, True)
    allowed = max(alone, products) + min(alone, products) / 2
    assert both < allowed, f"{both:.1f} ms for {alone:.1f} ms of copies and {products:.1f} ms of products"
    return {"copies ms": alone, "products ms": products, "both ms": both, "copied GB/s": 2 * x.nbytes / alone / 1e6}
