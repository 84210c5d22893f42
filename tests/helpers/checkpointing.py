"""Small checkpoints that say themselves of which step they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from helpers.ranks import grid

from colossus.checkpoint import folder
from colossus.checkpoint.checkpoint_store import DiskStore
from colossus.checkpoint.manifest import About
from colossus.checkpoint.part import Part
from colossus.checkpoint.reader import CheckpointReader
from colossus.context.parallel_context import ParallelContext

#: rows of the tensor that ranks share out, and its columns
ROWS, COLUMNS = 4, 3


def state_of(step: int, rank: int = 0, world: int = 1) -> tuple[list[Part], dict[str, Any]]:
    """A rank's rows of a matrix, and a vector that the last rank writes; all elements are the step."""
    rows = ROWS // world
    box = ((rank * rows, (rank + 1) * rows), (0, COLUMNS))
    return (
        [
            Part("model/matrix", (ROWS, COLUMNS), box, torch.full((rows, COLUMNS), float(step))),
            Part.whole("model/vector", torch.full((5,), float(step)), writes=rank == world - 1),
        ],
        {f"ranks/{rank}/step": step},
    )


def save(store: DiskStore, step: int, *, rank: int = 0, world: int = 1, background: bool = False) -> None:
    store.put(lambda: state_of(step, rank, world), About(step), background=background).wait()


def one_process() -> ParallelContext:
    return ParallelContext(grid(), 0)


def step_in(path: Path, num_ranks: int = 1) -> int:
    """The step of a checkpoint, when it is whole to the last byte."""
    with CheckpointReader(path) as reader:
        reader.verify()
        step = reader.manifest.step
        assert torch.equal(reader.tensor("model/matrix"), torch.full((ROWS, COLUMNS), float(step)))
        assert torch.equal(reader.tensor("model/vector"), torch.full((5,), float(step)))
        assert reader.manifest.values == {f"ranks/{rank}/step": step for rank in range(num_ranks)}
    return step


def latest_step(root: Path, num_ranks: int = 1) -> int:
    """The step where a run would go on, 0 where it would begin."""
    path = folder.find_latest(root)
    return step_in(path, num_ranks) if path is not None else 0
