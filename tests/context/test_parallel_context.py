"""ParallelContext: groups for any axes in any order, made and destroyed any number of times."""

# configs are written with dict(...), and so are the tests of them

from __future__ import annotations

import itertools
import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from helpers.ports import free_port
from helpers.ranks import grid, run_ranks
from torch import distributed as dist

from colossus.comm.collectives import all_gather
from colossus.config.schema import Parallel
from colossus.context.grid import LayerOptions, RankGrid, build_grid
from colossus.context.parallel_context import ParallelContext, current_context
from colossus.planner.fake_rank import fake_world

THREE = RankGrid({"data": 2, "row": 2, "col": 2}, {"tensor": ("row", "col"), "data": ("data",)})


# -- groups ---------------------------------------------------------------------------------------------------


def _gather_ranks(context: ParallelContext, order: list[tuple[str, ...]]) -> dict[str, Any]:
    out = {}
    for axes in order:
        group = context.group(axes)
        seen = all_gather(torch.tensor([context.rank]), group).wait().tolist() if group.size > 1 else [context.rank]
        out[",".join(axes)] = seen, list(group.ranks), group.index
    return out


def test_groups_follow_the_order_of_their_axes() -> None:
    """A collective over a tuple of axes sees the ranks in the order of the tuple, reversed tuples included."""
    names = ("data", "row", "col")
    orders = [axes for count in (1, 2, 3) for axes in itertools.permutations(names, count)]
    results = run_ranks(8, _gather_ranks, [*orders, ("tensor",)], plan=THREE)
    for rank, result in enumerate(results):
        for axes in orders:
            seen, ranks, index = result[",".join(axes)]
            assert seen == ranks == THREE.group(rank, axes)
            assert seen[index] == rank
        assert result["tensor"] == result["row,col"]
    assert results[0]["row,col"][0] == [0, 1, 2, 3]
    assert results[0]["col,row"][0] == [0, 2, 1, 3]


def _silent_rank(rank: int) -> tuple[float, str]:
    context = ParallelContext(grid(data=2, tensor=2), rank, timeout_seconds=1.0)
    errors = []
    started = time.monotonic()
    for axes in ("tensor", ("tensor", "data")):
        group = context.group(axes)
        if rank == 0:
            try:
                dist.all_reduce(torch.ones(1), group=group.process_group)
            except RuntimeError as error:
                errors.append(str(error))
    if rank:
        time.sleep(2.5)
    return time.monotonic() - started, " | ".join(errors)


@pytest.mark.long
def test_the_timeout_holds_for_every_group() -> None:
    """Groups of single axes come from the DeviceMesh, whose own default is half an hour."""
    waited, errors = run_ranks(4, _silent_rank, with_context=False, timeout=20)[0]
    assert errors.count("1000ms") == 2, (waited, errors)


# -- life -----------------------------------------------------------------------------------------------------


def _many(rank: int, keep_world: bool, port: str) -> list[float]:
    dist.barrier()  # a rank that destroys a group while another still connects to it ends both
    if not keep_world:
        dist.destroy_process_group()
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    sums = []
    plans = [grid(data=2, tensor=2), grid(tensor=4), grid(pipeline=2, data=2)]
    for attempt in range(7):
        context = ParallelContext(plans[attempt % 3], rank)
        assert context._owns_world is not keep_world
        with context:
            for axes in ("tensor", "data", ("data", "pipeline"), ("tensor", "data")):
                group = context.group(axes)
                if group.size > 1:
                    total = torch.ones(1)
                    dist.all_reduce(total, group=group.process_group)
                    sums.append(total.item())
        context.close()
        context.close()
        assert dist.is_initialized() is keep_world
    if keep_world:
        total = torch.ones(1)
        dist.all_reduce(total)  # the user's own group is untouched
        assert total.item() == 4
        assert len(dist.distributed_c10d._world.pg_map) == 1
    return sums


@pytest.mark.parametrize("keep_world", [True, False], ids=["world of the user", "world of its own"])
def test_made_and_destroyed_many_times(keep_world: bool) -> None:
    once = [2.0, 2.0, 2.0, 4.0, 4.0, 4.0, 2.0, 4.0, 2.0]
    results = run_ranks(4, _many, keep_world, str(free_port()), with_context=False, timeout=30)
    assert results == [[*once, *once, *once[:4]]] * 4


def _world_without_backend(rank: int, port: str) -> list[float]:
    """On ranks of a user's own world, which may have a device."""
    dist.barrier()
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group(rank=rank, world_size=2)  # "cpu:gloo,cuda:nccl" where there are devices
    assert dist.group.WORLD is not None
    sums = []
    for _ in range(2):
        context = ParallelContext(grid(data=2), rank)
        dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
        background = context.background_group("saves", timedelta(seconds=10))
        assert background.process_group is not dist.group.WORLD
        assert dist.group.WORLD.bound_device_id is not None
        dist.group.WORLD.bound_device_id = None
        total = torch.ones(1)
        dist.all_reduce(total, group=background.process_group)
        sums.append(total.item())
        context.close()
    dist.destroy_process_group()
    return sums


def test_background_work_has_a_group_of_its_own_in_any_world_of_the_user() -> None:
    """A communicator that is split off that of the world would need all ranks; gloo cannot be split."""
    assert run_ranks(2, _world_without_backend, str(free_port()), with_context=False) == [[2.0, 2.0]] * 2


def test_the_current_context() -> None:
    outside = current_context()
    assert outside.world_size == 1
    first, second = ParallelContext(grid()), ParallelContext(grid())
    with first:
        assert current_context() is first
        with second:
            assert current_context() is second
        assert current_context() is first
        second.close()
        first.close()
        assert current_context() not in (first, second)
    assert current_context().world_size == 1


# -- 4,096 ranks ----------------------------------------------------------------------------------------------

BIG = [
    dict(data=16, pipeline=4, tensor=dict(mode="2d", size=64)),
    dict(data=8, sequence=4, tensor=dict(mode="2.5d", size=128, depth=2)),
    dict(data=1, tensor=dict(mode="3d", size=4096)),
]


def _big(_: int, parallel: dict[str, Any], rank: int) -> dict[str, Any]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    plan = build_grid(Parallel.model_validate(parallel))
    dist.init_process_group("fake", rank=rank, world_size=4096, store=FakeStore())
    context = ParallelContext(plan, rank, backend="fake", options=LayerOptions(tensor_mode=parallel["tensor"]["mode"]))
    groups = {}
    tensor = plan.public["tensor"]
    for axes in ("data", "pipeline", "tensor", ("data", "sequence"), tensor[::-1], (tensor[-1], "data"), *tensor):
        group = context.group(axes)
        if group.size > 1:
            assert group.process_group is not None
            assert dist.get_process_group_ranks(group.process_group) == list(group.ranks)
        groups[str(axes)] = axes, group.ranks, group.index
    out = {"groups": groups, "at": context.coordinates, "mesh": list(context.mesh.get_coordinate() or ())}
    context.close()
    dist.destroy_process_group()
    return out


@pytest.mark.parametrize("parallel", BIG, ids=lambda p: f"{p['tensor']['mode']} {p['tensor']['size']}")
def test_4096_ranks(parallel: dict[str, Any]) -> None:
    rank = 2741
    plan = build_grid(Parallel.model_validate(parallel))
    assert plan.world_size == 4096
    (result,) = run_ranks(1, _big, parallel, rank, with_context=False)
    assert result["at"] == plan.coordinates(rank)
    assert result["mesh"] == list(plan.coordinates(rank).values())
    for axes, ranks, index in result["groups"].values():
        assert list(ranks) == plan.group(rank, axes)
        assert index == plan.index(rank, axes)


# -- errors ---------------------------------------------------------------------------------------------------


def test_started_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ValueError, match="needs 4 processes, but this one was started alone: start it with `colossus"):
        ParallelContext(grid(tensor=4), 0)


def _errors(rank: int) -> list[str]:
    said = []
    for plan, at in ((grid(data=2, tensor=2), rank), (grid(tensor=2), 1 - rank)):
        try:
            ParallelContext(plan, at)
        except ValueError as error:
            said.append(str(error))
    context = ParallelContext(grid(tensor=2), rank)
    dist.barrier()
    group = context.group("tensor")
    context.close()
    with pytest.raises(RuntimeError, match="over tensor is closed, with the engine"):
        all_gather(torch.tensor([rank]), group)
    for axes in ("tensor", "data"):
        try:
            context.group(axes)
        except ValueError as error:
            said.append(str(error))
    return said


def test_wrong_world_size_wrong_rank_and_closed() -> None:
    for rank, said in enumerate(run_ranks(2, _errors, with_context=False)):
        assert said == [
            "pipeline 1 x data 2 x sequence 1 x tensor 2 = 4, but 2 processes are running",
            f"the context has rank {1 - rank}, the process group has rank {rank}",
            "this ParallelContext is closed",
            "this ParallelContext is closed",
        ]


@pytest.mark.parametrize("port", [None, "x", "0"], ids=["no port", "no number", "nobody comes"])
def test_ranks_that_cannot_meet_are_told(monkeypatch: pytest.MonkeyPatch, port: str | None) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    if port is not None:
        monkeypatch.setenv("MASTER_PORT", port)  # 0: any port that is free
    with pytest.raises(
        ValueError, match=rf"rank 0 of 2 did not connect to the others at 127\.0\.0\.1:{port} \(MASTER_ADDR"
    ):
        ParallelContext(grid(data=2), 0, timeout_seconds=1.0)


def test_state_travels_beside_activations() -> None:
    """A communicator runs one collective at a time: where activations use the ranks, gradients have another one."""
    with fake_world(8, 0):
        context = ParallelContext(grid(data=2, sequence=4))
        own, of_activations = context.state_group("sequence"), context.group("sequence")
        assert (own.ranks, str(own)) == (of_activations.ranks, str(of_activations))
        assert own.process_group is not of_activations.process_group
        assert context.state_group("sequence") is own
        for axes in ("data", ("data", "sequence")):
            assert context.state_group(axes) is context.group(axes)
        context.close()
