"""The cases of the train-step benchmark by name.

``megatron-lean`` is ``megatron`` with embedding, head and loss whole on every rank.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from benchmarks.workload import Workload

REFERENCE, LOW_REFERENCE = "serial", "serial-bf16"
TOLERANCE = 1e-4
#: between two orders of summation in bf16, whose numbers are 2^-8 apart; a gradient that is not summed is off by more
LOW_TOLERANCE = 1e-2


class Case(Protocol):
    """A model with its optimizer on one rank."""

    def step(self, index: int) -> tuple[float, float]:
        """One training step on batch ``index``; the loss before it and the gradient norm before clipping, global."""
        ...


@dataclass(frozen=True)
class Kind:
    """A case and how it is built.

    Attributes:
        world: number of ranks.
        peers: names of the cases it is measured against, besides ``serial``.
        reference: the case whose losses and norms it must show.
        tolerance: how far off they may be, relative (below 1: absolute); infinite where it computes something else.
        in_default: whether it runs where no cases are named.
        tf32: whether products of fp32 are computed in TensorFloat-32.
        compiled: whether `torch.nn.Module.compile` compiles each block on its own.
    """

    name: str
    world: int
    module: str
    maker: str
    options: tuple[tuple[str, Any], ...] = ()
    peers: tuple[str, ...] = ()
    reference: str = REFERENCE
    tolerance: float = TOLERANCE
    in_default: bool = True
    tf32: bool = False
    compiled: bool = False

    @property
    def precision(self) -> str:
        """Return the precision of the products."""
        return "bf16" if self.tolerance == LOW_TOLERANCE and not self.tf32 else "fp32"

    def load(self) -> Callable[..., Case]:
        """Import and return the class of the case, best before forking: once instead of on every rank."""
        maker: Callable[..., Case] = getattr(importlib.import_module(f"benchmarks.peers.{self.module}"), self.maker)
        return maker

    def build(self, workload: Workload, rank: int) -> Case:
        if self.tf32:
            torch.set_float32_matmul_precision("high")
        case: Any = self.load()(workload, rank, self.world, **dict(self.options))
        if self.compiled:
            dynamo: Any = importlib.import_module("torch._dynamo")
            dynamo.config.fail_on_recompile_limit_hit = True
            for block in case.model.blocks:
                block.compile()
        return case


#: one process in other precisions: the end of the names of plain torch's case and of ours, and what they have
_SERIAL: dict[str, dict[str, Any]] = {
    "bf16": {},
    "tf32": dict(tf32=True),
    "bf16-compiled": dict(compiled=True),
    "tf32-compiled": dict(tf32=True, compiled=True),
}


def _kinds() -> dict[str, Kind]:
    kinds = [
        Kind("serial", 1, "plain", "PlainCase"),
        Kind("colossus", 1, "ours", "ColossusCase", peers=("serial",)),
    ]
    for suffix, more in _SERIAL.items():
        low = "bf16" in suffix
        shared = dict(reference=f"serial-{suffix}", tolerance=LOW_TOLERANCE, in_default=False, **more)
        plain, ours = ((("low", True),), (("precision", "bf16"),)) if low else ((), ())
        kinds.append(Kind(f"serial-{suffix}", 1, "plain", "PlainCase", plain, **(shared | {"reference": REFERENCE})))
        kinds.append(Kind(f"colossus-{suffix}", 1, "ours", "ColossusCase", ours, (f"serial-{suffix}",), **shared))
    for n in (2, 4):
        kinds += [*_whole(n), *_sharded(n), *_in_bf16(n), *_bounds(n)]
    return {kind.name: kind for kind in kinds}


def _whole(n: int) -> list[Kind]:
    """Return cases that are whole on every data rank, or split by tensor parallelism."""
    whole_vocabulary = (("split_vocabulary", False),)
    tensor_peers = (f"megatron-{n}", f"megatron-lean-{n}", f"dtensor-{n}", f"alone-{n}")
    return [
        Kind(f"ddp-{n}", n, "ddp", "DDPCase"),
        Kind(f"colossus-data-{n}", n, "ours", "ColossusCase", _plan(data=n), (f"ddp-{n}", f"alone-{n}")),
        Kind(f"dtensor-{n}", n, "dtensor", "DTensorCase"),
        Kind(f"megatron-{n}", n, "megatron", "MegatronCase"),
        Kind(f"megatron-lean-{n}", n, "megatron", "MegatronCase", whole_vocabulary),
        Kind(f"colossus-tensor-{n}", n, "ours", "ColossusCase", _plan(tensor=n), tensor_peers),
    ]


def _sharded(n: int) -> list[Kind]:
    """Return ZeRO and its peers; ``keep``: weights gathered in forward are kept to backward."""

    def ours(name: str, stage: int, *peers: str, weights: str = "matmul") -> Kind:
        options = _plan(data=n, zero=stage, tensor=dict(mode="1d", size=1, weights=weights))
        against = tuple(f"{peer}-{n}" for peer in peers)
        return Kind(f"{name}-{n}", n, "ours", "ColossusCase", options, against, in_default=False)

    return [
        Kind(f"zero-redundancy-{n}", n, "ddp", "ZeroRedundancyCase", in_default=False),
        ours("colossus-zero1", 1, "zero-redundancy", "alone"),
        ours("colossus-zero2", 2, "fsdp-keep"),
        Kind(f"fsdp-{n}", n, "fsdp", "FSDPCase", in_default=False),
        Kind(f"fsdp-prefetch-{n}", n, "fsdp", "FSDPCase", (("prefetch", True),), in_default=False),
        ours("colossus-zero3", 3, "fsdp", "fsdp-prefetch"),
        Kind(f"fsdp-keep-{n}", n, "fsdp", "FSDPCase", (("reshard", False),), in_default=False),
        ours("colossus-zero3-keep", 3, "fsdp-keep", weights="microbatch"),
    ]


def _bounds(n: int) -> list[Kind]:
    """Return processes that do not talk, each with its share of the batch, and our cases without shared memory."""

    def over_gloo(name: str, *peers: str, **parallel: Any) -> Kind:
        options = (*_plan(**parallel), ("over_gloo", True))
        against = tuple(f"{peer}-{n}" for peer in (*peers, "alone"))
        return Kind(f"colossus-{name}-gloo-{n}", n, "ours", "ColossusCase", options, against, in_default=False)

    alone = (("alone", True),)
    return [
        Kind(f"alone-{n}", n, "plain", "PlainCase", alone, (REFERENCE,), tolerance=math.inf, in_default=False),
        over_gloo("data", "ddp", data=n),
        over_gloo("tensor", "megatron", tensor=n),
        over_gloo("zero1", "zero-redundancy", data=n, zero=1),
        over_gloo("zero3", "fsdp", data=n, zero=3),
    ]


def _in_bf16(n: int) -> list[Kind]:
    low, bf16 = (("low", True),), (("precision", "bf16"),)
    ours, zero_1, zero_3 = ((*bf16, *_plan(data=n, **zero)) for zero in ({}, dict(zero=1), dict(zero=3)))
    return [
        _low(f"ddp-bf16-{n}", n, "ddp", "DDPCase", low),
        _low(f"colossus-data-bf16-{n}", n, "ours", "ColossusCase", ours, (f"ddp-bf16-{n}",)),
        _low(f"zero-redundancy-bf16-{n}", n, "ddp", "ZeroRedundancyCase", low),
        _low(f"colossus-zero1-bf16-{n}", n, "ours", "ColossusCase", zero_1, (f"zero-redundancy-bf16-{n}",)),
        _low(f"fsdp-bf16-{n}", n, "fsdp", "FSDPCase", low),
        _low(f"colossus-zero3-bf16-{n}", n, "ours", "ColossusCase", zero_3, (f"fsdp-bf16-{n}",)),
    ]


def _plan(**parallel: Any) -> tuple[tuple[str, Any], ...]:
    return (("parallel", parallel),)


def _low(name: str, world: int, module: str, maker: str, options: Any, peers: tuple[str, ...] = ()) -> Kind:
    return Kind(name, world, module, maker, options, peers, LOW_REFERENCE, LOW_TOLERANCE, in_default=False)


def _recomputing() -> dict[str, Kind]:
    """Return cases of one process that recompute activations: torch's own checkpointing of plain blocks, and ours."""
    ours: Any = ("ours", "ColossusCase")
    every_other = (("recompute", {"type": "full", "every": 2}),)
    kinds = [Kind("colossus-full-every-2", 1, *ours, every_other, ("colossus",), in_default=False)]
    for name in ("selective", "full"):
        options, peers = (("recompute", name),), ("colossus", f"serial-{name}")
        kinds.insert(0, Kind(f"colossus-{name}", 1, *ours, options, peers, in_default=False))
        kinds.insert(0, Kind(f"serial-{name}", 1, "plain", "PlainCase", options, ("serial",), in_default=False))
    return {kind.name: kind for kind in kinds}


RECOMPUTING = _recomputing()
KINDS = _kinds() | RECOMPUTING
