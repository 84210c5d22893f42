"""NCCL: with one rank every call that colossus makes, in each dtype; with several devices whole plans."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from benchmarks.gpu.ranks import RankPool, count_devices
from benchmarks.gpu.section import Case, Figures, LeftOut
from benchmarks.gpu.sections.plans import PLANS, check_plan
from benchmarks.gpu.trained import References
from colossus import torch_versions
from colossus.comm import objects
from colossus.context.groups import AxisGroup, new_process_group, set_timeout, store_of

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
#: numbers of a buffer; several buffers of that size are written over
SIZE, COUNT = 1 << 20, 8
#: cycles for which a stream sleeps: some 50 ms
CYCLES = 100_000_000


def numbers(device: torch.device, seed: int = 0) -> Tensor:
    return torch.arange(SIZE, device=device, dtype=torch.float32) + seed


def write_over(device: torch.device) -> list[Tensor]:
    """New tensors of the same size, on the stream that is current."""
    return [torch.full((SIZE,), torch.nan, device=device) for _ in range(COUNT)]


def cases(device: torch.device, budget: float) -> Iterator[Case]:
    pool, references = RankPool(device, backend="nccl"), References()
    for name, plan in PLANS.items():
        if plan.world > 1:
            yield Case(f"{name}, a device each", partial(_on_devices, pool, references, name), seconds=75)
    pool.close()
    references.close()
    bodies: dict[str, Callable[[torch.device], Figures | None]] = {
        "collectives": _collectives,
        "collectives that are recorded": _functional,
        "messages to itself": _messages,
        "objects": _objects,
        "groups of our own": _groups,
        "a collective's buffers are kept": _kept,
    }
    for name, body in bodies.items():  # after those that fork
        yield Case(f"one rank: {name}", partial(_alone, device, body), seconds=40)


def _on_devices(pool: RankPool, references: References, name: str) -> Figures:
    plan, count = PLANS[name], count_devices()
    if plan.world > count:
        raise LeftOut(f"NCCL wants a device for each rank, and there {'is' if count == 1 else 'are'} {count or 'none'}")
    return check_plan(pool, references, plan)


def _alone(device: torch.device, body: Callable[[torch.device], Figures | None]) -> Figures | None:
    if device.type != "cuda":
        raise LeftOut("no CUDA device")
    if not dist.is_initialized():
        torch.cuda.set_device(device)
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        limit = timedelta(seconds=30)
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, timeout=limit, device_id=device)
    figures = body(device)
    torch.cuda.synchronize()
    return figures


def _values(device: torch.device, dtype: torch.dtype) -> Tensor:
    return (torch.arange(24, device=device) % 7).view(4, 6).to(dtype)


def _require(found: Tensor, wanted: Tensor, what: str) -> None:
    assert torch.equal(found, wanted), f"{what} in {wanted.dtype} gives {found.tolist()}"


def _collectives(device: torch.device) -> Figures:
    """As `comm.collectives` starts them: asynchronous, in place or into a tensor of its own."""
    for dtype in DTYPES:
        x = _values(device, dtype)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            y = x.clone()
            dist.all_reduce(y, op, async_op=True).wait()
            _require(y, x, f"all_reduce {op}")
        calls: dict[str, Callable[..., Any]] = {
            "all_gather_single": torch_versions.all_gather_single,
            "reduce_scatter_single": torch_versions.reduce_scatter_single,
            "all_to_all_single": dist.all_to_all_single,
        }
        for name, call in calls.items():
            out = torch.empty_like(x)
            call(out, x, async_op=True).wait()
            _require(out, x, name)
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, [4], [4], async_op=True).wait()
        _require(out, x, "all_to_all_single of uneven parts")
        y = x.clone()
        dist.broadcast(y, 0)
        _require(y, x, "broadcast")
    return {"dtypes": len(DTYPES)}


def _functional(device: torch.device) -> Figures:
    """As they are called where torch records operations, and inside of what it compiles."""
    assert dist.group.WORLD is not None
    name, ops = dist.group.WORLD.group_name, torch.ops._c10d_functional

    def all_of_them(x: Tensor) -> list[Tensor]:
        started = [
            ops.all_reduce(x, "sum", name),
            ops.all_gather_into_tensor(x, 1, name),
            ops.reduce_scatter_tensor(x, "sum", 1, name),
            ops.all_to_all_single(x, [4], [4], name),
        ]
        return [ops.wait_tensor(y) * 2 for y in started]

    for dtype in (torch.float32, torch.bfloat16):
        x = _values(device, dtype)
        for function in (all_of_them, torch.compile(all_of_them, backend="aot_eager", fullgraph=True)):
            for y in function(x):
                _require(y, x * 2, "a functional collective")
    return {"operators": 4}


def _messages(device: torch.device) -> Figures:
    """Batches of messages, as rings and exchanges of rows send them."""
    for dtype in DTYPES:
        x = _values(device, dtype)
        y = torch.empty_like(x)
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 0), dist.P2POp(dist.irecv, y, 0)])
        for work in works:
            work.wait()
        _require(y, x, "a message")
    return {"dtypes": len(DTYPES)}


def _objects(device: torch.device) -> Figures:
    group = AxisGroup(("world",), (0,), 0, dist.group.WORLD)
    value = {"a": [1, 2.5, "three"]}
    gathered: list[Any] = [None]
    dist.all_gather_object(gathered, value)
    sent = [value]
    dist.broadcast_object_list(sent, src=0)
    assert gathered == [value] == sent, f"{gathered}, {sent}"
    assert objects.all_gather_object(value, group) == [value]
    dist.barrier()
    return {"objects": 3}


def _groups(device: torch.device) -> Figures:
    """Made, given a time-out, used and destroyed, as a context does."""
    for number in range(3):
        group = new_process_group((0,), 0, f"test-gpu/{number}", timedelta(seconds=20))
        set_timeout(group, timedelta(seconds=25))
        x = _values(device, torch.float32)
        y = x.clone()
        dist.all_reduce(y, group=group, async_op=True).wait()
        _require(y, x, "all_reduce in a group")
        store_of(group).set(f"test-gpu/{number}", "there")
        torch.cuda.synchronize()
        dist.destroy_process_group(group)
    return {"groups": 3}


def _kept(device: torch.device) -> Figures:
    """An input that is dropped once a collective is started is not written over before it was read."""
    sources = [numbers(device, seed) for seed in range(COUNT)]
    wanted = [source.cpu() for source in sources]
    outs = [torch.empty_like(source) for source in sources]
    dist.all_reduce(torch.zeros(1, device=device))  # communicators are made
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    works = [
        torch_versions.all_gather_single(out, source, async_op=True) for out, source in zip(outs, sources, strict=True)
    ]
    sources.clear()
    kept = write_over(device)
    for work in works:
        work.wait()
    for out, value in zip(outs, wanted, strict=True):
        assert torch.equal(out.cpu(), value), "the input was written over before the collective had read it"
    return {"buffers": COUNT, "buffers written over": len(kept)}
