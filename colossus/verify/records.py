"""What each rank of a verified run writes down, and how the parent reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colossus.layout.layout import Layout


@dataclass(frozen=True)
class ParameterFacts:
    """What is known of a logical parameter beside its values.

    Attributes:
        layout: how its shape is split over the axes of the plan.
        gradient_axes: axes over which a rank's gradient is a partial sum, which the engine therefore takes.
        origin: the layer that made it, or ``plain parameter``.
        stages: of the pipeline, those that use it.
        pipeline_ranks: where these are, the one whose value is compared first.
    """

    shape: tuple[int, ...]
    layout: Layout
    gradient_axes: tuple[str, ...]
    origin: str
    stages: tuple[int, ...] = (0,)
    pipeline_ranks: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class RankFacts:
    """What is known of a rank before the first step.

    Attributes:
        batch_part: which part of the global batch its model takes, of how many.
        modules: name -> class of the modules whose outputs are compared.
        rank_of: stage of the pipeline -> pipeline rank, for all stages.
        silenced: modules whose dropout was turned off, and functions that this rank called to drop.
        batch_norms: modules whose output depends on the samples that a rank holds at once.
        parameters: of those that the rank holds, by logical name.
    """

    batch_part: tuple[int, int]
    modules: dict[str, str]
    rank_of: dict[int, int]
    silenced: tuple[str, ...]
    batch_norms: tuple[str, ...]
    parameters: dict[str, ParameterFacts]


@dataclass(frozen=True)
class Call:
    """One tensor that one call of a module returned.

    Attributes:
        stage: of the pipeline, in whose forward it was called.
        number: of the call among those of this module in this forward, from 1.
        path: to the tensor in what was returned.
    """

    stage: int
    module: str
    number: int
    path: str


@dataclass(frozen=True)
class Output:
    """A module's output on the samples of one rank: shape of one sample, and `row_prints`, [samples, 2]."""

    shape: tuple[int, ...]
    rows: Tensor


@dataclass
class RankStep:
    """One rank's view of one step.

    Attributes:
        leaves, samples: paths of the batch's tensors, and the `sample_keys` of the samples this rank's model took.
        outputs: in the order of the calls.
        calls: (stage, module) -> how often it was called in one forward.
        order: logical names in the order in which backward finished their gradients.
        gradients, weights: logical name -> `whole_print`, made whole over the ranks that hold parts, for what this rank
            holds.
    """

    loss: float = 0.0
    tokens: int = 0
    grad_norm: float = 0.0
    leaves: list[str] = field(default_factory=list)
    samples: list[tuple[str, ...]] = field(default_factory=list)
    outputs: dict[Call, Output] = field(default_factory=dict)
    calls: dict[tuple[int, str], int] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


class Records:
    """The files of one run. Step 0 is the state before the first step.

    Args:
        folder: where the ranks write.
        world_size: how many there are.
    """

    def __init__(self, folder: Path, world_size: int) -> None:
        self.folder, self.world_size = folder, world_size

    def write(self, value: Any, kind: str, rank: int = 0, step: int = 0) -> None:
        torch.save(value, self._path(kind, rank, step))

    def facts(self, rank: int) -> RankFacts:
        held: RankFacts = self._read("facts", rank)
        return held

    def parameters(self) -> dict[str, ParameterFacts]:
        """Those of all ranks, by logical name."""
        held: dict[str, ParameterFacts] = {}
        for rank in range(self.world_size):
            held = {**self.facts(rank).parameters, **held}
        return held

    def start(self, rank: int) -> dict[str, Tensor]:
        """A rank's prints of the initial values that it holds."""
        held: dict[str, Tensor] = self._read("start", rank)
        return held

    def step(self, rank: int, step: int) -> RankStep:
        held: RankStep = self._read("step", rank, step)
        return held

    def whole(self, kind: str, step: int) -> dict[str, Tensor]:
        """Rank 0's whole ``gradients`` or ``weights`` (buffers among them) of a step by logical name."""
        held: dict[str, Tensor] = self._read(kind, 0, step)
        return held

    def _read(self, kind: str, rank: int = 0, step: int = 0) -> Any:
        # written a moment ago by our own ranks into a folder of our own
        return torch.load(self._path(kind, rank, step), map_location="cpu", weights_only=False)

    def _path(self, kind: str, rank: int, step: int) -> Path:
        return self.folder / f"{kind}-rank{rank}-step{step}.pt"
