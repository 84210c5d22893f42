"""A rank of the checkpoint benchmark: the same tensors, saved and loaded by colossus or by torch."""

from __future__ import annotations

import logging
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from benchmarks import memory
from colossus.checkpoint.checkpoint_store import DiskStore
from colossus.checkpoint.folder import name_of
from colossus.checkpoint.manifest import About
from colossus.checkpoint.part import Part, choose_writers
from colossus.checkpoint.reader import CheckpointReader
from colossus.context.grid import RankGrid
from colossus.context.parallel_context import ParallelContext
from colossus.layout.layout import Layout

_AXIS = "tensor"


@dataclass
class Tile:
    """A rank's part of a tensor: split in ``dim``, or whole (None)."""

    key: str
    shape: tuple[int, ...]
    dim: int | None
    local: Tensor


def parts(plan: str, sizes: tuple[int, int, int], rank: int, world: int) -> Iterator[Tile]:
    """Yield the weights and both moments of a GPT.

    Plans: ``tensor`` (1D), ``other`` (each split in its other dim), ``data``. Every element follows from its place.
    """
    for number, (name, shape, dim) in enumerate(_weights(*sizes)):
        if plan == "data":
            dim = None
        elif plan == "other" and dim is not None and len(shape) > 1:
            dim = 1 - dim
        for section in ("model", "exp_avg", "exp_avg_sq"):
            size = list(shape)
            first = 0
            if dim is not None:
                size[dim] //= world
                first = size[dim] * rank
            index = [torch.arange(count, dtype=torch.float32) for count in size]
            if dim is not None:
                index[dim] += first
            local = sum(
                values.view([-1 if axis == other else 1 for other in range(len(shape))]) * (3 * axis + 1)
                for axis, values in enumerate(index)
            )
            assert isinstance(local, Tensor)
            yield Tile(f"{section}/{name}", shape, dim, (local + number).contiguous())


def _weights(hidden: int, layers: int, vocab: int) -> Iterator[tuple[str, tuple[int, ...], int | None]]:
    yield "embedding.weight", (vocab, hidden), 0
    yield "positions.weight", (1024, hidden), None
    for layer in range(layers):
        for name, out, of, dim in (
            ("query", hidden, hidden, 0),
            ("key", hidden, hidden, 0),
            ("value", hidden, hidden, 0),
            ("out", hidden, hidden, 1),
            ("up", 4 * hidden, hidden, 0),
            ("down", hidden, 4 * hidden, 1),
        ):
            yield f"blocks.{layer}.{name}.weight", (out, of), dim
            yield f"blocks.{layer}.{name}.bias", (out,), 0 if dim == 0 else None
        for norm in ("norm1", "norm2"):
            yield f"blocks.{layer}.{norm}.weight", (hidden,), None
            yield f"blocks.{layer}.{norm}.bias", (hidden,), None


class Worker:
    """A rank of a `RankGroup`; ``name`` is who saves and loads, ``colossus`` or ``torch``."""

    def __init__(self, name: str, plan: str, sizes: tuple[int, int, int], root: Path, rank: int) -> None:
        memory.pages_of_their_own()
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
        self._rank, world = rank, dist.get_world_size()
        self._parts = list(parts(plan, sizes, rank, world))
        self._others = list(parts("other", sizes, rank, world)) if plan == "tensor" else self._parts
        self._run: Any = (Ours if name == "colossus" else Torchs)(root / name / plan, rank, world)

    def num_bytes(self) -> int:
        """Return the bytes of the tensors; replicas are counted once."""
        return sum(
            part.local.numel() * part.local.element_size()
            for part in self._parts
            if part.dim is not None or not self._rank
        )

    def check(self) -> None:
        """Raise RuntimeError unless both loads give what was saved.

        Raises:
            RuntimeError: the first tensor that differs.
        """
        self.time("save")
        for operation, tensors in (("load", self._parts), ("load, other plan", self._others)):
            wanted = [part.local.clone() for part in tensors]
            for part in tensors:
                part.local.zero_()
            self.time(operation)
            for part, want in zip(tensors, wanted, strict=True):
                if not torch.equal(part.local, want):
                    raise RuntimeError(f"{operation}: {part.key} is not what was saved")
        self.time("stall")

    def time(self, operation: str) -> float:
        """Return the seconds of one operation, which all ranks begin at once."""
        run, finish = self._prepare(operation)
        dist.barrier()
        began = time.perf_counter()
        run()
        seconds = time.perf_counter() - began
        finish()
        dist.barrier()
        return seconds

    def peak(self, operation: str) -> int | None:
        """Return the bytes that the first such operation of this process adds."""
        if operation.startswith("load"):
            self.time("save")
        run, finish = self._prepare(operation)
        dist.barrier()

        def whole() -> None:
            run()
            finish()

        return memory.resident_growth(whole)

    def _prepare(self, operation: str) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return the operation, and what is to be done after it outside of the clock."""
        if operation in ("load", "load, other plan"):
            tensors = self._parts if operation == "load" else self._others
            return (lambda: self._run.load(tensors)), (lambda: None)
        self._run.clear()
        if operation == "save":
            return (lambda: self._run.save(self._parts)), (lambda: None)
        return (lambda: self._run.start(self._parts)), (lambda: self._run.finish())


def _empty(root: Path) -> None:
    for path in root.glob("*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


class Ours:
    def __init__(self, root: Path, rank: int, world: int) -> None:
        self._grid = RankGrid({_AXIS: world}, {_AXIS: (_AXIS,)})
        self._context = ParallelContext(self._grid, rank)
        self._root, self._rank = root, rank
        self._store = DiskStore(root, self._context)
        self._about = About(1)

    def clear(self) -> None:
        if self._rank == 0:
            _empty(self._root)

    def _state(self, tensors: list[Tile]) -> tuple[list[Part], dict[str, Any]]:
        sizes, at = self._grid.sizes, self._context.coordinates
        layouts = [
            Layout(tuple((_AXIS,) if dim == part.dim else () for dim in range(len(part.shape)))) for part in tensors
        ]
        chosen = [
            (layout, part.shape, part.local.element_size()) for layout, part in zip(layouts, tensors, strict=True)
        ]
        parts = [
            Part(part.key, part.shape, layout.box(part.shape, sizes, at), part.local, writes)
            for part, layout, writes in zip(tensors, layouts, choose_writers(chosen, sizes, at), strict=True)
        ]
        return parts, {}

    def save(self, tensors: list[Tile]) -> None:
        self._store.put(lambda: self._state(tensors), self._about, background=False).wait()

    def start(self, tensors: list[Tile]) -> None:
        self._save = self._store.put(lambda: self._state(tensors), self._about)

    def finish(self) -> None:
        self._save.wait()

    def load(self, tensors: list[Tile]) -> None:
        with CheckpointReader(self._root / name_of(1)) as reader:
            reader.verify(self._context.group(_AXIS))
            for tensor in self._state(tensors)[0]:
                reader.read_box(tensor.key, tensor.box, tensor.local)


class Torchs:
    def __init__(self, root: Path, rank: int, world: int) -> None:
        self._mesh = init_device_mesh("cpu", (world,))
        self._root, self._rank = root, rank
        self._save: Any = None

    def clear(self) -> None:
        if self._rank == 0:
            _empty(self._root)

    def _state(self, tensors: list[Tile]) -> dict[str, Any]:
        places = [[Replicate() if part.dim is None else Shard(part.dim)] for part in tensors]
        return {
            part.key: DTensor.from_local(part.local, self._mesh, place, run_check=False)
            for part, place in zip(tensors, places, strict=True)
        }

    def save(self, tensors: list[Tile]) -> None:
        dcp.save(self._state(tensors), checkpoint_id=self._root)

    def start(self, tensors: list[Tile]) -> None:
        self._save = dcp.async_save(self._state(tensors), checkpoint_id=self._root)

    def finish(self) -> None:
        self._save.result()

    def load(self, tensors: list[Tile]) -> None:
        dcp.load(self._state(tensors), checkpoint_id=self._root)
