"""Checkpoints in the memory of hosts: who keeps what, what is found again, what is passed over.

Hosts are folders here, each of two ranks.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.damage import flip, truncate
from helpers.ranks import grid, run_ranks

from colossus.checkpoint import memory_store
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.folder import file_of, name_of
from colossus.checkpoint.manifest import About
from colossus.checkpoint.memory_store import MemoryStore
from colossus.checkpoint.part import Part
from colossus.config import ConfigError
from colossus.context.parallel_context import ParallelContext

ROWS, WIDTH = 7, 5


def root_of(tmp_path: Path, rank: int, hosts: int = 2) -> Path:
    root = tmp_path / f"host{rank * hosts // 4}"
    root.mkdir(exist_ok=True)
    return root


def values(step: int) -> torch.Tensor:
    return torch.arange(4 * ROWS * WIDTH, dtype=torch.float64).view(4 * ROWS, WIDTH) + 1000 * step


def state_of(rank: int, step: int) -> Any:
    """Each rank holds some rows of one tensor; the first one a value, too."""
    start = rank * ROWS
    local = values(step)[start : start + ROWS].clone()
    box = Part("model/w", (4 * ROWS, WIDTH), ((start, start + ROWS), (0, WIDTH)), local)
    return [box], {"step": step} if rank == 0 else {}


def save_steps(context: ParallelContext, tmp_path: Path, steps: tuple[int, ...], copies: int, hosts: int = 2) -> None:
    memory = MemoryStore(root_of(tmp_path, context.rank, hosts), context, copies)
    for step in steps:
        memory.put(lambda step=step: state_of(context.rank, step), About(step)).wait()
    memory.close()


def read(context: ParallelContext, tmp_path: Path, later_than: int = -1, until: int | None = None) -> Any:
    """The step that is found and the whole tensor that the rank reads of it, or None."""
    memory = MemoryStore(root_of(tmp_path, context.rank), context)
    reader = memory.get(later_than, until)
    content = None if reader is None else (reader.manifest.step, reader.tensor("model/w").tolist())
    dist.barrier()
    memory.close()
    return content


def save_on_ranks(tmp_path: Path, *steps: int, copies: int = 1) -> None:
    run_ranks(4, save_steps, tmp_path, steps, copies, plan=grid(data=4))


def read_on_ranks(tmp_path: Path, *limits: Any) -> Any:
    """What all ranks have found, which must be the same."""
    first, *others = run_ranks(4, read, tmp_path, *limits, plan=grid(data=4))
    assert all(content == first for content in others)
    return first


def files(tmp_path: Path, host: int) -> list[str]:
    return sorted(str(path.relative_to(tmp_path / f"host{host}")) for path in (tmp_path / f"host{host}").rglob("*.*"))


def test_each_host_keeps_two_generations_of_its_own_ranks(tmp_path: Path) -> None:
    save_on_ranks(tmp_path, 3, 4, 5)
    for host in range(2):
        own = [f"rank-{rank:05d}.safetensors" for rank in (2 * host, 2 * host + 1)]
        names = [f"step-{step:08d}/{name}" for step in (4, 5) for name in ["manifest.json", *own]]
        assert files(tmp_path, host) == names
    assert read_on_ranks(tmp_path) == (5, values(5).tolist())
    assert read_on_ranks(tmp_path, -1, 4) == (4, values(4).tolist())
    assert read_on_ranks(tmp_path, 5) is None


def test_with_copies_a_host_that_is_lost_is_not_missed(tmp_path: Path) -> None:
    save_on_ranks(tmp_path, 3, copies=2)
    for host in range(2):
        names = ["manifest.json", *(f"rank-0000{rank}.safetensors" for rank in range(4))]
        assert files(tmp_path, host) == [f"step-00000003/{name}" for name in names]
    shutil.rmtree(tmp_path / "host1")
    assert read_on_ranks(tmp_path) == (3, values(3).tolist())


def test_without_copies_what_a_lost_host_had_is_missed(tmp_path: Path) -> None:
    save_on_ranks(tmp_path, 3)
    shutil.rmtree(tmp_path / "host1")
    assert read_on_ranks(tmp_path) is None


@pytest.mark.parametrize("how", ["flip", "truncate", "remove", "manifest"])
@pytest.mark.rest("truncate", "remove", "manifest")
def test_a_damaged_generation_is_passed_over_for_the_one_before(tmp_path: Path, how: str) -> None:
    save_on_ranks(tmp_path, 3, 4)
    path = tmp_path / "host1" / "step-00000004" / "rank-00003.safetensors"
    if how == "flip":
        flip(path, -3)
    elif how == "truncate":
        truncate(path, 1)
    elif how == "remove":
        path.unlink()
    else:
        (tmp_path / "host0" / "step-00000004" / "manifest.json").unlink()
    assert read_on_ranks(tmp_path) == (3, values(3).tolist())


def test_a_damaged_copy_is_not_the_only_one(tmp_path: Path) -> None:
    save_on_ranks(tmp_path, 3, copies=2)
    path = tmp_path / "host0" / "step-00000003" / "rank-00000.safetensors"
    flip(path, -3)
    assert read_on_ranks(tmp_path) == (3, values(3).tolist())


def lose_the_connection(context: ParallelContext, tmp_path: Path) -> str:
    memory = MemoryStore(root_of(tmp_path, context.rank), context, 2)
    with pytest.raises(CheckpointError, match="no-such-file in the memory of host") as caught:
        memory.remote(1 - memory.host).read("no-such-file", 0, memoryview(bytearray(1)))
    memory.put(lambda: state_of(context.rank, 1), About(1)).wait()
    memory.close()
    return str(caught.value)


def test_a_host_that_could_not_answer_once_is_asked_again(tmp_path: Path) -> None:
    """Else no later save would have its second copy, and none would succeed."""
    for message in run_ranks(4, lose_the_connection, tmp_path, plan=grid(data=4)):
        assert "No such file" in message
    shutil.rmtree(tmp_path / "host1")
    assert read_on_ranks(tmp_path) == (1, values(1).tolist())


def save_too_much(context: ParallelContext, tmp_path: Path) -> str:
    memory = MemoryStore(root_of(tmp_path, context.rank), context, 2)
    generations, copy = 4 * 2 * ROWS * WIDTH * 8, 2 * ROWS * WIDTH * 8
    memory_store.machine.memory_bytes = lambda: (1000, generations + copy - 1)
    with pytest.raises(ConfigError) as caught:
        memory.put(lambda: state_of(context.rank, 1), About(1))
    memory.close()
    return str(caught.value)


def test_what_does_not_fit_is_refused_before_it_is_begun(tmp_path: Path) -> None:
    for message in run_ranks(4, save_too_much, tmp_path, plan=grid(data=4)):
        assert "two generations of the state of its ranks and of the host before it need 2.24 KB" in message
        assert "has 2.24 KB left in" in message
        assert "beside the copy that a save makes first" in message
    assert not list(tmp_path.rglob("step-*"))


def fail_on_one(context: ParallelContext, tmp_path: Path) -> str:
    """The second save fails where a rank's state cannot be collected; the first stays."""
    memory = MemoryStore(root_of(tmp_path, context.rank), context)
    memory.put(lambda: state_of(context.rank, 1), About(1)).wait()

    def collect() -> Any:
        if context.rank == 3:
            raise RuntimeError("no state")
        return state_of(context.rank, 2)

    with pytest.raises(CheckpointError) as caught:
        memory.put(collect, About(2)).wait()
    memory.close()
    return str(caught.value)


def test_a_rank_makes_room_for_what_it_writes_and_waits_for_no_other(tmp_path: Path) -> None:
    """Not for the first of its host, which removes the rest of the oldest: three would be there meanwhile."""
    for step in (1, 2):
        (tmp_path / name_of(step)).mkdir()
        for rank in (0, 1):
            (tmp_path / name_of(step) / file_of(rank)).touch()

    def prepare(context: ParallelContext) -> None:
        memory = MemoryStore(tmp_path, context)
        if not memory.is_first:
            memory._prepare(tmp_path / "step-3.tmp")

    run_ranks(2, prepare, plan=grid(data=2))
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*"))
    assert names == [f"{name_of(1)}/{file_of(0)}", f"{name_of(2)}/{file_of(0)}", f"{name_of(2)}/{file_of(1)}"]


def test_a_save_that_fails_on_one_rank_leaves_nothing_and_the_one_before(tmp_path: Path) -> None:
    assert all("rank 3" in message for message in run_ranks(4, fail_on_one, tmp_path, plan=grid(data=4)))
    assert not list(tmp_path.rglob("step-00000002*"))
    assert read_on_ranks(tmp_path) == (1, values(1).tolist())


def forget(context: ParallelContext, tmp_path: Path) -> None:
    memory = MemoryStore(root_of(tmp_path, context.rank), context)
    memory.remove_later(3)
    dist.barrier()
    memory.close()


def test_a_branch_that_is_left_is_forgotten(tmp_path: Path) -> None:
    save_on_ranks(tmp_path, 3, 4)
    run_ranks(4, forget, tmp_path, plan=grid(data=4))
    assert read_on_ranks(tmp_path) == (3, values(3).tolist())
    save_on_ranks(tmp_path, 4)
    assert read_on_ranks(tmp_path)[0] == 4
