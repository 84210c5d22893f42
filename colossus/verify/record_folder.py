"""The folder of a record: for each rank and step one safetensors file, whose metadata tell what its tensors are.

Ranks write by themselves; nobody waits and nothing is pickled. ``step-00001-rank-00003.safetensors`` has the parts of
parameters and gradients of a rank in a step; step 0 has the parameters at the start.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from colossus.layout.layout import Box

VERSION = 1


class RecordError(ValueError):
    """A folder that has no record, or a record with a missing or unreadable part; the message names it."""


class Part(NamedTuple):
    """A rank's part of a parameter or of its gradient.

    Attributes:
        kind: ``weight`` or ``gradient``.
        name: the logical name.
        box: (start, stop) of every dim in the whole.
        shape: the shape of the whole.
        value: a tensor of the size of the box, on the CPU.
    """

    kind: str
    name: str
    box: Box
    shape: tuple[int, ...]
    value: Tensor


@dataclass
class Forward:
    """A forward of a rank.

    Attributes:
        samples: a key for each sample: equal keys are equal samples.
        loss: the loss that the loop or the model told; None without one.
        count: the number of valid tokens that the loss is a mean of.
        outputs: title of a module's call -> (shape of a sample, `row_fingerprints`).
    """

    samples: list[str]
    loss: float | None = None
    count: float | None = None
    outputs: dict[str, tuple[list[int], Any]] = field(default_factory=dict)

    def add(self, title: str, shape: list[int], rows: Tensor) -> None:
        call = 1
        while (key := f"{title}, call {call}" if call > 1 else title) in self.outputs:
            call += 1
        self.outputs[key] = shape, rows.tolist()


@dataclass
class StepRecord:
    """The values of a rank in a step.

    Attributes:
        number: the step; 0 is the start.
        dtypes: the dtypes of outputs of modules.
        norm: the norm of all gradients by the loop itself; None without one.
        forwards: the forwards with gradients, in their order.
        parts: parameters after the step, and gradients.
    """

    number: int
    dtypes: set[str] = field(default_factory=set)
    norm: float | None = None
    forwards: list[Forward] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)


def refuse_old_record(folder: Path, rank: int) -> None:
    """Make the folder.

    Raises:
        FileExistsError: it has a file of this rank.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob(f"step-*-rank-{rank:05}.safetensors")):
        raise FileExistsError(f"{folder} has a record already: remove it, or record into another folder")


def write_step(folder: Path, rank: int, world: int, step: StepRecord) -> None:
    """Write the file of a rank's step; it appears with its name when it is whole."""
    about = {
        "version": VERSION,
        "world": world,
        "norm": step.norm,
        "dtypes": sorted(step.dtypes),
        "forwards": [vars(forward) for forward in step.forwards],
        "parts": [[part.kind, part.name, part.box, part.shape] for part in step.parts],
    }
    path = folder / f"step-{step.number:05}-rank-{rank:05}.safetensors"
    values = {str(number): part.value for number, part in enumerate(step.parts)}
    partial = path.with_suffix(".partial")
    save_file(values, partial, metadata={"colossus": json.dumps(about)})
    os.replace(partial, path)


class Record:
    """A record of all ranks, read step by step.

    Args:
        folder: the folder that `record` wrote.

    Raises:
        RecordError: the folder has no record, or files of ranks or steps are missing.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        files = sorted(self.folder.glob("step-*-rank-*.safetensors"))
        if not files:
            raise RecordError(f"{folder}: no record (files step-00000-rank-00000.safetensors ..) is there")
        ranks: dict[int, list[int]] = {}
        for file in files:
            _, step, _, rank = file.stem.split("-")
            ranks.setdefault(int(rank), []).append(int(step))
        self.world = int(self._about(0, min(ranks))["world"])
        missing = sorted({*range(self.world)} - ranks.keys())
        if missing:
            raise RecordError(f"{folder}: of {self.world} ranks, {missing} have written nothing there")
        self.steps = min(max(steps) for steps in ranks.values())

    def rank_step(self, step: int, rank: int) -> StepRecord:
        """Return the values of a rank in a step; tensors are read from a memory map."""
        about = self._about(step, rank)
        with self._open(step, rank) as file:
            parts = [
                Part(kind, name, tuple(map(tuple, box)), tuple(shape), file.get_tensor(str(number)))
                for number, (kind, name, box, shape) in enumerate(about["parts"])
            ]
        forwards = [Forward(**forward) for forward in about["forwards"]]
        return StepRecord(step, set(about["dtypes"]), about["norm"], forwards, parts)

    def _open(self, step: int, rank: int) -> Any:
        path = self.folder / f"step-{step:05}-rank-{rank:05}.safetensors"
        try:
            return safe_open(path, "pt")
        except (OSError, SafetensorError) as error:
            raise RecordError(f"{path} cannot be read: {error}") from None

    def _about(self, step: int, rank: int) -> dict[str, Any]:
        with self._open(step, rank) as file:
            about: dict[str, Any] = json.loads((file.metadata() or {}).get("colossus", "{}"))
        if about.get("version") != VERSION:
            raise RecordError(f"{self.folder}: written in version {about.get('version')} of records, not {VERSION}")
        return about


@dataclass
class Whole:
    """A parameter or gradient of a record: the parts that ranks have of it.

    Attributes:
        shape: the shape of the whole.
        copies: box -> (rank, part) of every rank that has it.
    """

    shape: tuple[int, ...]
    copies: dict[Box, list[tuple[int, Tensor]]]

    @property
    def value(self) -> Tensor:
        """The whole in float64, by the lowest rank's part where several have a box; made anew each time.

        A record is compared one tensor after the other: the parts are in a memory map, and wholes are not kept.
        """
        value = torch.zeros(self.shape, dtype=torch.float64)
        for box, copies in self.copies.items():
            value[tuple(slice(*span) for span in box)] = copies[0][1].double()
        return value

    @property
    def missing(self) -> int:
        """The number of elements that no rank has."""
        return math.prod(self.shape) - sum(copies[0][1].numel() for copies in self.copies.values())

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.copies.values()))[0][1].dtype


def put_together(steps: list[StepRecord], kind: str) -> dict[str, Whole]:
    """Return the wholes of a kind by name, in the order of the first rank that has them."""
    wholes: dict[str, Whole] = {}
    for rank, step in enumerate(steps):
        for part in step.parts:
            if part.kind == kind:
                whole = wholes.setdefault(part.name, Whole(part.shape, {}))
                whole.copies.setdefault(part.box, []).append((rank, part.value))
    return wholes
