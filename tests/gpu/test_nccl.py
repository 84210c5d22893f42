"""NCCL with one rank: every call that colossus makes, in each dtype; on the CPU the same calls under gloo.

Whole plans under NCCL are in `test_plans`, where a machine has several devices.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from helpers.device_ranks import DeviceRanks
from torch import Tensor
from torch import distributed as dist

from colossus import torch_versions
from colossus.comm import objects
from colossus.context.groups import AxisGroup, new_process_group, set_timeout, store_of

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
#: numbers of a buffer; number of buffers that are written over
SIZE, COUNT = 1 << 20, 8
#: cycles for which a stream sleeps: some 50 ms
CYCLES = 100_000_000


def run_alone(rank: int, device: torch.device, body: Callable[[torch.device], None]) -> None:
    """Run a body in a process group of this one rank, which the rank keeps."""
    if not dist.is_initialized():
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        backend, where = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        store, limit = dist.HashStore(), timedelta(seconds=30)
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=limit, device_id=where)
    body(device)
    synchronize(device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def values(device: torch.device, dtype: torch.dtype) -> Tensor:
    return (torch.arange(24, device=device) % 7).view(4, 6).to(dtype)


def require(tensor: Tensor, expected: Tensor, name: str) -> None:
    assert torch.equal(tensor, expected), f"{name} in {expected.dtype} gives {tensor.tolist()}"


def run_collectives(device: torch.device) -> None:
    """Call collectives as `comm.collectives` does: asynchronously, in place or into a tensor of their own."""
    for dtype in DTYPES:
        x = values(device, dtype)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            y = x.clone()
            dist.all_reduce(y, op, async_op=True).wait()
            require(y, x, f"all_reduce {op}")
        calls: dict[str, Callable[..., Any]] = {
            "all_gather_single": torch_versions.all_gather_single,
            "reduce_scatter_single": torch_versions.reduce_scatter_single,
            "all_to_all_single": dist.all_to_all_single,
        }
        for name, call in calls.items():
            out = torch.empty_like(x)
            call(out, x, async_op=True).wait()
            require(out, x, name)
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, [4], [4], async_op=True).wait()
        require(out, x, "all_to_all_single of uneven parts")
        y = x.clone()
        dist.broadcast(y, 0)
        require(y, x, "broadcast")


def run_functional(device: torch.device) -> None:
    """Call collectives as torch's recorded operations, also inside of what it compiles."""
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
        x = values(device, dtype)
        for function in (all_of_them, torch.compile(all_of_them, backend="aot_eager", fullgraph=True)):
            for y in function(x):
                require(y, x * 2, "a functional collective")


def send_to_itself(device: torch.device) -> None:
    """Send batches of messages, as rings and exchanges of rows do."""
    for dtype in DTYPES:
        x = values(device, dtype)
        y = torch.empty_like(x)
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 0), dist.P2POp(dist.irecv, y, 0)])
        for work in works:
            work.wait()
        require(y, x, "a message")


def exchange_objects(device: torch.device) -> None:
    group = AxisGroup(("world",), (0,), 0, dist.group.WORLD)
    value = {"a": [1, 2.5, "three"]}
    gathered: list[Any] = [None]
    dist.all_gather_object(gathered, value)
    sent = [value]
    dist.broadcast_object_list(sent, src=0)
    assert gathered == [value] == sent, f"{gathered}, {sent}"
    assert objects.all_gather_object(value, group) == [value]
    dist.barrier()


def make_groups(device: torch.device) -> None:
    """Make groups, set their time-out, use and destroy them, as a context does."""
    for number in range(3):
        group = new_process_group((0,), 0, f"test-gpu/{number}", timedelta(seconds=20))
        set_timeout(group, timedelta(seconds=25))
        x = values(device, torch.float32)
        y = x.clone()
        dist.all_reduce(y, group=group, async_op=True).wait()
        require(y, x, "all_reduce in a group")
        store_of(group).set(f"test-gpu/{number}", "there")
        synchronize(device)
        dist.destroy_process_group(group)


def drop_inputs(device: torch.device) -> None:
    """Drop inputs once a collective is started: they must not be written over before they were read."""
    sources = [torch.arange(SIZE, device=device, dtype=torch.float32) + seed for seed in range(COUNT)]
    expected = [source.cpu() for source in sources]
    outs = [torch.empty_like(source) for source in sources]
    dist.all_reduce(torch.zeros(1, device=device))  # communicators are made
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    works = [
        torch_versions.all_gather_single(out, source, async_op=True) for out, source in zip(outs, sources, strict=True)
    ]
    sources.clear()
    overwritten = [torch.full((SIZE,), torch.nan, device=device) for _ in range(COUNT)]
    for work in works:
        work.wait()
    for out, value in zip(outs, expected, strict=True):
        assert torch.equal(out.cpu(), value), "the input was written over before the collective had read it"
    del overwritten


BODIES: dict[str, Callable[[torch.device], None]] = {
    "collectives": run_collectives,
    "collectives that are recorded": run_functional,
    "objects": exchange_objects,
    "groups of our own": make_groups,
}


@pytest.mark.parametrize("name", BODIES)
def test_one_rank(ranks: DeviceRanks, name: str) -> None:
    ranks.run_one(run_alone, BODIES[name])


@pytest.mark.parametrize("body", [send_to_itself, drop_inputs])
def test_one_rank_of_nccl(cuda: torch.device, ranks: DeviceRanks, body: Callable[[torch.device], None]) -> None:
    ranks.run_one(run_alone, body)
