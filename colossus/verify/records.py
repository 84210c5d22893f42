"""What each rank of a verified run writes, and how the parent reads it.

Activations are neither kept nor moved: a fingerprint, two numbers, stands for each sample of each.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colossus.layout.layout import Layout
from colossus.nest import tensors


@dataclass(frozen=True)
class ParameterInfo:
    """A logical parameter, without its values.

    Attributes:
        layout: how its shape is split over the axes of the plan.
        gradient_axes: axes over which a rank's gradient is partial, so that the engine sums it.
        origin: the layer that made it, or ``plain parameter``.
        stages: the pipeline stages that use it.
        pipeline_ranks: the pipeline ranks of these stages; the value of the first one is compared.
    """

    shape: tuple[int, ...]
    layout: Layout
    gradient_axes: tuple[str, ...]
    origin: str
    stages: tuple[int, ...] = (0,)
    pipeline_ranks: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class RankInfo:
    """What a rank knows of the model apart from the steps.

    Attributes:
        batch_shard: index of the shard of the global batch that its model takes.
        modules: name -> class of the modules whose outputs are compared.
        rank_of: pipeline stage -> pipeline rank, for all stages.
        without_dropout: modules and functions called on this rank whose dropout was turned off.
        batch_norms: modules whose output depends on the samples that a rank holds at once.
        parameters: of those that the rank holds, by logical name.
    """

    batch_shard: int
    modules: dict[str, str]
    rank_of: dict[int, int]
    without_dropout: tuple[str, ...]
    batch_norms: tuple[str, ...]
    parameters: dict[str, ParameterInfo]


@dataclass(frozen=True)
class Call:
    """One tensor that one call of a module returned.

    Attributes:
        stage: the pipeline stage in whose forward it was called.
        number: of the call among those of this module in this forward, from 1.
        path: leads to the tensor in what was returned.
    """

    stage: int
    module: str
    number: int
    path: str


@dataclass(frozen=True)
class Output:
    """A module's output on the samples of one rank.

    Attributes:
        shape: of one sample.
        rows: `row_fingerprints`, [samples, 2].
        by_token: where sequences are compared token by token: dim of a sample that may be its tokens, since it has as
            many as the rank's part of a sequence -> [samples, tokens, 2].
    """

    shape: tuple[int, ...]
    rows: Tensor
    by_token: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class RankStep:
    """One rank's view of one step.

    Attributes:
        leaves, samples: paths of the batch's tensors, and the `sample_keys` of the samples this rank's model took.
        positions: where sequences are compared token by token: position in its sequence of each token that the rank
            holds; padding lies behind the end.
        num_positions: tokens of a sequence, without padding.
        outputs: in the order of the calls.
        calls: (stage, module) -> how often it was called in one forward.
        order: logical names in the order in which backward finished their gradients.
        gradients, weights: logical name -> `fingerprint` of the full tensor, for those that this rank holds a shard of.
    """

    loss: float = 0.0
    tokens: int = 0
    grad_norm: float = 0.0
    leaves: list[str] = field(default_factory=list)
    samples: list[tuple[str, ...]] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    num_positions: int = 0
    outputs: dict[Call, Output] = field(default_factory=dict)
    calls: dict[tuple[int, str], int] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


class Records:
    """The files of one run; step 0 is the state before the first step.

    Args:
        folder: where the ranks write.
        world_size: how many there are.
    """

    def __init__(self, folder: Path, world_size: int) -> None:
        self.folder, self.world_size = folder, world_size

    def write(self, value: Any, kind: str, rank: int = 0, step: int = 0) -> None:
        torch.save(value, self._path(kind, rank, step))

    def rank_info(self, rank: int) -> RankInfo:
        held: RankInfo = self._read("info", rank)
        return held

    def parameters(self) -> dict[str, ParameterInfo]:
        """Those of all ranks, by logical name."""
        held: dict[str, ParameterInfo] = {}
        for rank in range(self.world_size):
            held = {**self.rank_info(rank).parameters, **held}
        return held

    def start(self, rank: int) -> dict[str, Tensor]:
        """Fingerprints of the initial values that a rank holds."""
        held: dict[str, Tensor] = self._read("start", rank)
        return held

    def step(self, rank: int, step: int) -> RankStep:
        held: RankStep = self._read("step", rank, step)
        return held

    def full(self, kind: str, step: int) -> dict[str, Tensor]:
        """The full ``gradients`` or ``weights`` (with buffers) of a step by logical name, as rank 0 gathered them."""
        held: dict[str, Tensor] = self._read(kind, 0, step)
        return held

    def _read(self, kind: str, rank: int = 0, step: int = 0) -> Any:
        # written a moment ago by our own ranks into a folder of our own
        return torch.load(self._path(kind, rank, step), map_location="cpu", weights_only=False)

    def _path(self, kind: str, rank: int, step: int) -> Path:
        return self.folder / f"{kind}-rank{rank}-step{step}.pt"


def row_fingerprints(x: Tensor) -> Tensor:
    """For each row of dim 0 its norm and its projection on a fixed pattern, [rows, 2] float64.

    A change of any element changes the projection by as much as it changes the norm of the row, but for directions
    that are orthogonal to the pattern, which no mistake is by chance.
    """
    x = x.detach()
    if x.is_complex():
        x = torch.view_as_real(x)
    rows = x.shape[0]
    last = x.shape[-1] if x.dim() > 1 else 1
    flat = x.double().reshape(rows, -1, last) if x.numel() else x.new_zeros((rows, 1, 1), dtype=torch.float64)
    projected = (flat @ _pattern(flat.shape[2], 1.7, x.device)) @ _pattern(flat.shape[1], 2.3, x.device)
    return torch.stack((torch.linalg.vector_norm(flat, dim=(1, 2)), projected), dim=1).cpu()


def token_fingerprints(x: Tensor, num_tokens: int) -> dict[int, Tensor]:
    """For every dim of a sample that has ``num_tokens``: the fingerprint of each token, [samples, tokens, 2].

    Args:
        x: [samples, ..]; the dims of a sample are counted from 0.
    """
    found = {}
    for dim in range(1, x.dim()):
        if x.shape[dim] == num_tokens:
            tokens = x.movedim(dim, 1)
            found[dim - 1] = row_fingerprints(tokens.flatten(0, 1)).view(*tokens.shape[:2], 2)
    return found


def fingerprint(x: Tensor) -> Tensor:
    """The fingerprint of one tensor as a single row, [2]."""
    return row_fingerprints(x.unsqueeze(0))[0]


def sample_keys(batch: Any) -> tuple[int, list[str], list[tuple[str, ...]]]:
    """The samples of a batch: their number, the path of each of its tensors, and a hash per tensor for each sample.

    Equal keys mean equal bits, wherever the sample stands in whichever shard of the batch.
    """
    leaves = [(path, leaf) for path, leaf in tensors(batch) if leaf.dim()]
    rows = leaves[0][1].shape[0] if leaves else 0
    leaves = [(path, leaf.detach().cpu()) for path, leaf in leaves if leaf.shape[0] == rows]
    keys = [tuple(_hash(leaf[row]) for _, leaf in leaves) for row in range(rows)]
    return rows, [path for path, _ in leaves], keys


def _pattern(size: int, frequency: float, device: torch.device) -> Tensor:
    return torch.cos(frequency * torch.arange(1, size + 1, dtype=torch.float64, device=device))


def _hash(sample: Tensor) -> str:
    data = sample.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=12).hexdigest()
