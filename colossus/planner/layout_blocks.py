"""The profile of a model under one layout, block by block: plans are composed of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from colossus.planner.optimizer_memory import OptimizerMemory
from colossus.planner.parameter_facts import ModelFacts
from colossus.planner.trace import Trace

#: the most bytes between two gradients of a backward: of activations, and of gradients that it has made by then
Level = tuple[int, int]


@dataclass(frozen=True)
class LastingBytes:
    """Bytes of a block's weights that tensor parallelism gathers once for all microbatches of a step.

    Attributes:
        weights: bytes of the gathered weights.
        gradients: bytes of their gradients, which wait for the last microbatch.
        largest: bytes of the largest of these gradients.
        reduced: bytes that are left of these gradients after their reduction.
    """

    weights: int = 0
    gradients: int = 0
    largest: int = 0
    reduced: int = 0


@dataclass(eq=False)
class BlockProfile:
    """One block of the model for one microbatch, on one rank. Equal blocks share a profile.

    Attributes:
        forward, backward: traces; a backward includes its recomputation.
        saved: bytes from its forward to its backward, its output included.
        forward_peak: the most bytes while its forward runs, beyond those that the blocks before it save.
        passed: bytes of its output.
        passed_back: bytes of the gradient of its output.
        lasting: bytes for all microbatches of a step; they are in no other bytes.
        levels: levels of ``backward``, activations beyond those that this block and the blocks before it save.
        wgrad: trace of the part of backward that a schedule may run later; None if the backward is not split.
        deferred: bytes that are alive from the end of backward to ``wgrad``; None if the backward is not split.
        wgrad_levels: levels of ``wgrad``, activations beyond ``deferred``.
    """

    forward: Trace
    saved: int
    forward_peak: int
    passed: int
    passed_back: int
    lasting: LastingBytes
    backward: Trace = field(default_factory=Trace)
    levels: Sequence[Level] = ()
    wgrad: Trace | None = None
    deferred: int | None = None
    wgrad_levels: Sequence[Level] = ()


@dataclass(frozen=True, eq=False)
class LayoutProfile:
    """The profile of a model.

    Attributes:
        blocks: all blocks in order; a model that is no chain is one block.
        facts: facts of the model's parameters.
        optimizer: memory of the optimizer.
        tokens: tokens of a sample, or what else the loss counts.
        sample: a batch of one sample of the data.
    """

    blocks: Sequence[BlockProfile]
    facts: ModelFacts
    optimizer: OptimizerMemory
    tokens: int
    sample: Any
