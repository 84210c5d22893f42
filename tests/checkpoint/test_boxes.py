"""Which rank writes which box, and any box out of what they have written: all ranks of a plan in one process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.drawn import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from colossus.checkpoint import tensor_file
from colossus.checkpoint.manifest import MANIFEST, About, merge
from colossus.checkpoint.part import Part, choose_writers, write_parts, written
from colossus.checkpoint.reader import CheckpointReader
from colossus.context.grid import RankGrid
from colossus.layout.layout import Layout

Shape = tuple[int, ...]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64)


@st.composite
def grids(draw: st.DrawFn) -> RankGrid:
    names = draw(st.permutations(["pipeline", "data", "row", "col"]))
    sizes = {name: draw(st.integers(1, 2 if name == "pipeline" else 4)) for name in names}
    return RankGrid(sizes, {name: (name,) for name in ("pipeline", "data")} | {"tensor": ("row", "col")})


@st.composite
def layouts(draw: st.DrawFn, num_dims: int, grid: RankGrid) -> Layout:
    """Of a parameter: sharded, its rows cut for storage."""
    if not num_dims:
        return Layout(())
    axes = draw(st.lists(st.sampled_from(["row", "col", "data"]), unique=True))
    stored = tuple(axis for axis in axes if axis == "data")
    dims: list[list[str]] = [[] for _ in range(num_dims)]
    for axis in axes:
        if axis in stored:
            continue
        dims[draw(st.integers(0, num_dims - 1))].append(axis)
    return Layout(tuple(map(tuple, dims)), stored=stored)


@st.composite
def tensors(draw: st.DrawFn, *of: RankGrid) -> tuple[Shape, torch.dtype, int, list[Layout]]:
    """Shape, dtype, the pipeline stage that holds it (-1: all), and a layout under each grid."""
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    stage = draw(st.sampled_from([0, 1, -1]))
    return shape, draw(st.sampled_from(DTYPES)), stage, [draw(layouts(len(shape), grid)) for grid in of]


@st.composite
def moves(draw: st.DrawFn) -> tuple[RankGrid, RankGrid, list[Any]]:
    saved, loaded = draw(grids()), draw(grids())
    return saved, loaded, draw(st.lists(tensors(saved, loaded), min_size=1, max_size=6))


def whole_tensor(number: int, shape: Shape, dtype: torch.dtype) -> Tensor:
    values = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape) + 13 * number
    return (values % 2 == 0) if dtype == torch.bool else (values % 100).to(dtype)


def stage_of(stage: int, grid: RankGrid) -> int | None:
    return None if stage < 0 else stage % grid.sizes["pipeline"]


def states(grid: RankGrid, drawn: list[Any], which: int) -> list[list[Part]]:
    """What every rank would add: as `parameter_parts` decides it, tensors of all stages written by the first."""
    out = []
    for rank in range(grid.world_size):
        at = grid.coordinates(rank)
        parts = []
        mine = [entry for entry in enumerate(drawn) if stage_of(entry[1][2], grid) in (None, at["pipeline"])]
        writers = choose_writers(
            [(layout[which], shape, dtype.itemsize) for _, (shape, dtype, _, layout) in mine], grid.sizes, at
        )
        for (number, (shape, dtype, home, layout)), is_writer in zip(mine, writers, strict=True):
            stage = stage_of(home, grid)
            is_here = stage is not None or at["pipeline"] == 0
            box = layout[which].box(shape, grid.sizes, at)
            local = whole_tensor(number, shape, dtype)[tuple(slice(*span) for span in box)]
            parts.append(Part(f"model/{number}", shape, box, local, is_writer and is_here))
        out.append(parts)
    return out


def write(folder: Path, of_ranks: list[list[Part]]) -> None:
    """As the ranks of `DiskStore` would."""
    folder.mkdir()
    parts = []
    for rank, state in enumerate(of_ranks):
        mine = written(state)
        part: dict[str, Any] = {"values": {}, "aliases": {}, "file": None, "tensors": []}
        if mine:
            path = folder / f"rank-{rank:05d}.safetensors"
            part |= write_parts(path, mine, [piece.local for piece in mine])
        parts.append(part)
    (folder / MANIFEST).write_bytes(merge(parts, About(0)).to_bytes())


@settings(max_examples=examples(25), deadline=None)
@given(moves(), st.sampled_from([(1 << 20, 1 << 15), (16, 1 << 15), (64, 4)]), st.sampled_from([None, 16, 64]))
def test_every_element_is_written_once_and_read_anywhere(
    tmp_path_factory: pytest.TempPathFactory,
    drawn: tuple[RankGrid, RankGrid, list[Any]],
    sizes: tuple[int, int],
    staged: int | None,
) -> None:
    """Whatever the block that is read at a time, the gap that is passed over, and the buffers on the way to a device
    (None: the targets are on the host)."""
    saved, loaded, specs = drawn
    of_ranks = states(saved, specs, 0)
    for number, (shape, _, _, _) in enumerate(specs):
        count = torch.zeros(shape, dtype=torch.int64)
        for state in of_ranks:
            for part in written(state):
                if part.key == f"model/{number}":
                    count[tuple(slice(*span) for span in part.box)] += 1
        assert (count == 1).all(), f"tensor {number}, {saved}"
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    write(folder, of_ranks)
    block, gap = sizes
    small = mock.patch.multiple(
        tensor_file,
        BLOCK_BYTES=block,
        _LONG_GAP_BYTES=gap,
        STAGED_BYTES=staged,
        is_on_device=lambda target: staged is not None,
    )
    with small, CheckpointReader(folder) as reader:
        reader.verify()
        assert reader.manifest.num_bytes == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        for state in states(loaded, specs, 1):
            for part in state:
                wanted = part.local
                # into memory that is not contiguous, and of another dtype, too
                for out in (torch.empty_like(wanted), torch.empty((*wanted.shape, 2), dtype=wanted.dtype)[..., 0]):
                    reader.read_box(part.key, part.box, out)
                    assert torch.equal(out, wanted), f"{part.key} {part.box}"
                wider = torch.complex128 if wanted.is_complex() else torch.float64
                out = torch.empty(wanted.shape, dtype=wider)
                reader.read_box(part.key, part.box, out)
                assert torch.equal(out, wanted.to(wider))
