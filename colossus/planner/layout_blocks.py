"""A model under one layout, block by block, as plans are put together from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from colossus.planner.optimizer_memory import OptimizerMemory
from colossus.planner.parameter_facts import ModelFacts
from colossus.planner.trace import Trace


@dataclass(frozen=True, eq=False)
class BlockProfile:
    """One block of the model for one microbatch, on one rank. Equal blocks share one.

    Attributes:
        forward, backward: what they do; a backward includes its recomputation.
        wgrad: what of backward a schedule may do later; None where it was not asked for.
        deferred: bytes that wait for ``wgrad`` when backward has gone; None as there.
        wgrad_peak: bytes at most while ``wgrad`` runs, beyond what waits for it.
        kept: bytes from its forward to its backward, its output among them.
        forward_peak, backward_peak: bytes at most while it runs, beyond what the blocks before it (and, in backward,
            itself) keep.
        passed: bytes of its output; and of these the bytes that get a gradient.
    """

    forward: Trace
    backward: Trace
    wgrad: Trace | None
    deferred: int | None
    wgrad_peak: int
    kept: int
    forward_peak: int
    backward_peak: int
    passed: int
    passed_back: int


@dataclass(frozen=True, eq=False)
class LayoutProfile:
    """All blocks of a model in order; of a model that is no chain, itself.

    Attributes:
        facts: of the model's parameters.
        optimizer: what it keeps of them.
        tokens: (or what else the loss counts) of a sample.
        sample: of the data, a batch of one.
    """

    blocks: Sequence[BlockProfile]
    facts: ModelFacts
    optimizer: OptimizerMemory
    tokens: int
    sample: Any
