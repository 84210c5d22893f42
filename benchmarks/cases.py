"""The cases of the train-step benchmark by name.

``megatron-lean`` is ``megatron`` with embedding, head and loss whole on every rank.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.workload import Workload


class Case(Protocol):
    """A model with its optimizer on one rank."""

    def step(self, index: int) -> tuple[float, float]:
        """One training step on batch ``index``; the loss before it and the gradient norm before clipping, global."""
        ...


@dataclass(frozen=True)
class Kind:
    """How to build a case.

    Attributes:
        world: number of ranks.
        peers: names of the cases it is measured against, besides ``serial``.
    """

    name: str
    world: int
    module: str
    maker: str
    options: tuple[tuple[str, Any], ...] = ()
    peers: tuple[str, ...] = ()

    def load(self) -> Callable[..., Case]:
        """The class of the case. Imported on demand, and best before forking: once instead of on every rank."""
        maker: Callable[..., Case] = getattr(importlib.import_module(f"benchmarks.peers.{self.module}"), self.maker)
        return maker

    def build(self, workload: Workload, rank: int) -> Case:
        return self.load()(workload, rank, self.world, **dict(self.options))


def _kinds() -> dict[str, Kind]:
    kinds = [Kind("serial", 1, "plain", "PlainCase"), Kind("colossus", 1, "ours", "ColossusCase", peers=("serial",))]
    for n in (2, 4):
        whole_vocabulary = (("split_vocabulary", False),)
        tensor_peers = (f"megatron-{n}", f"megatron-lean-{n}", f"dtensor-{n}")
        kinds += [
            Kind(f"ddp-{n}", n, "ddp", "DDPCase"),
            Kind(f"colossus-data-{n}", n, "ours", "ColossusCase", (("data", n),), (f"ddp-{n}",)),
            Kind(f"dtensor-{n}", n, "dtensor", "DTensorCase"),
            Kind(f"megatron-{n}", n, "megatron", "MegatronCase"),
            Kind(f"megatron-lean-{n}", n, "megatron", "MegatronCase", whole_vocabulary),
            Kind(f"colossus-tensor-{n}", n, "ours", "ColossusCase", (("tensor", n),), tensor_peers),
        ]
    return {kind.name: kind for kind in kinds}


def _recomputing() -> dict[str, Kind]:
    """One process that computes activations again: torch's own checkpointing of plain blocks, and ours."""
    kinds = []
    for name in ("full", "selective"):
        of = (("recompute", name),)
        kinds += [
            Kind(f"serial-{name}", 1, "plain", "PlainCase", of, peers=("serial",)),
            Kind(f"colossus-{name}", 1, "ours", "ColossusCase", of, peers=("colossus", f"serial-{name}")),
        ]
    every_other = (("recompute", {"type": "full", "every": 2}),)
    offloaded = (("recompute", {"type": "full", "offload": True}),)
    kinds += [
        Kind("colossus-full-every-2", 1, "ours", "ColossusCase", every_other, peers=("colossus",)),
        Kind("colossus-full-offload", 1, "ours", "ColossusCase", offloaded, peers=("colossus",)),
    ]
    return {kind.name: kind for kind in kinds}


RECOMPUTING = _recomputing()
KINDS = _kinds() | RECOMPUTING
