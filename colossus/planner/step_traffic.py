"""The collectives of weights and gradients of one pipeline rank in a step, with their bytes. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from colossus.comm import accounting


@dataclass(frozen=True)
class Collective:
    """A collective that a rank starts.

    Attributes:
        operation, axes: the names under which `colossus.comm.accounting` counts it.
        ranks: size of its group.
        input_bytes: bytes of a rank's input.
        mesh_axes: axes of the plan's grid along which its ranks lie; empty if they share a host.
    """

    operation: str
    axes: str
    ranks: int
    input_bytes: float
    mesh_axes: tuple[str, ...]

    @property
    def sent(self) -> float:
        """Return the bytes that a rank sends."""
        return accounting.sent(self.operation.partition(" ")[0], self.ranks, self.input_bytes)

    @property
    def result_bytes(self) -> float:
        """Return the bytes of a rank's result."""
        if self.operation.startswith("all_gather"):
            return self.input_bytes * self.ranks
        return self.input_bytes / (self.ranks if self.operation.startswith("reduce_scatter") else 1)


@dataclass(frozen=True)
class RowTraffic:
    """The rows of parameters that travel in one collective.

    Attributes:
        gather: the gather of their values.
        reduction: the reduction of their gradients, None if they are frozen.
        whole: bytes of the gathered parameters.
        gradients: bytes of their whole gradients, 0 if they are frozen.
        sums: bytes of the rows of the summed gradients, before they are cast to the optimizer's dtype.
        is_shared: whether they travel through shared memory, from which rows are copied to where they belong.
    """

    gather: Collective
    reduction: Collective | None
    whole: int
    gradients: int
    sums: int
    is_shared: bool

    def buffers(self, collective: Collective) -> float:
        """Return the bytes of the input and of the result of its gather or reduction."""
        if self.is_shared:
            return 0.0
        return collective.input_bytes + (collective.result_bytes if collective.ranks > 1 else 0.0)


@dataclass(frozen=True)
class BlockGather:
    """The gather of a block's weights, which are freed within the step (ZeRO-3).

    Attributes:
        stage, block: the block that needs them; the gather starts while the block before it runs.
        in_backward: whether each backward gathers them again, because each forward frees them.
        collectives: the collectives, one after the other; none over a single rank.
        whole: bytes of the gathered weights.
        buffers: bytes of the collectives' inputs and results.
        gradients: bytes of the gradients of these weights, before their reduction.
    """

    stage: int
    block: int
    in_backward: bool
    collectives: tuple[Collective, ...]
    whole: int
    buffers: float
    gradients: int


@dataclass(frozen=True)
class Reduction:
    """The reduction of gradients that travel together.

    Attributes:
        stage: stage of the parameters.
        block: the block whose backward completes the last gradient; None if they wait for the end of the stage.
        when: "each" for a reduction in each backward of the stage (or wgrad, if the schedule splits it), "last" for one
            in the last backward of the step.
        collectives: the collectives, one after the other; none over a single rank.
        freed: bytes of whole gradients that are freed when it starts; buckets are not counted here.
        buffers: bytes that it needs until it has ended, buckets not counted.
        sums: bytes of the sums that stay from then on.
    """

    stage: int
    block: int | None
    when: Literal["each", "last"]
    collectives: tuple[Collective, ...]
    freed: int = 0
    buffers: float = 0.0
    sums: int = 0
