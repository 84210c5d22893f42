"""ZeRO: data ranks share the optimizer's state, the gradients and the parameters (1910.02054)."""

from __future__ import annotations

from dataclasses import replace

from colossus.data_parallel.engine_queries import BackwardKind
from colossus.data_parallel.strategy import Strategy
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.gradients.buckets import LocalSum, first_of_each
from colossus.gradients.parts import ModelParts
from colossus.gradients.reduction import GradientReduction


class Zero(Strategy):
    """Each rank along data and sequence stores rows of every parameter, and updates them; exact.

    | stage | kept by rows | whole |
    |---|---|---|
    | 1 | optimizer state | parameters; gradients until the step ends |
    | 2 | and gradients | parameters; the gradients of a block until they are reduced |
    | 3 | and parameters | the parameters of a block while it runs; those of the root block for the step |

    A gradient is reduced to rows over these axes, and summed over the others on the rows. Along data, all ranks share
    the rows, or, where the context has the axes ``replicate`` and ``shard``, those along ``shard`` (HSDP, 2304.11277).

    Args:
        stage: 1, 2 or 3.
        offload: rows, and with them the optimizer's state, are in the memory of the host.
    """

    def __init__(self, stage: int, offload: bool = False) -> None:
        if stage not in (1, 2, 3):
            raise ValueError(f"zero: stage = {stage!r}; use 1, 2 or 3")
        self._stage, self._offload = stage, offload

    def dense_because(self) -> str:
        return "parallel.zero cuts every parameter over data itself and scatters dense gradients"

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        grid = parts.context.grid
        data = tuple(axis for axis in grid.axes("data") if axis != "replicate")
        store.shard((*data, *grid.axes("sequence")), stage=self._stage, offload=self._offload)
        super().setup(store, parts)
        self._scatter = store.scatter(parts.parameters_by_stage)
        summed = replace(
            parts,
            parameters_by_stage={
                stage: [store.summed(param) for param in params] for stage, params in parts.parameters_by_stage.items()
            },
            tied=[(store.summed(param), ranks) for param, ranks in parts.tied],
        )
        self._rest = GradientReduction(summed, self.summed_axes)

    def after_backward(self, stage: int, microbatch: int, kind: BackwardKind) -> None:
        if kind == "backward_weight":
            self._scatter.after_wgrad(stage)

    def last_backward(self, stage: int) -> None:
        self._scatter.arm(stage)

    def reduce(self, stage: int) -> None:
        self._scatter.start(stage)

    def finish(self) -> None:
        for stage in self.parts.parameters_by_stage:
            self._scatter.finish(stage)
        for stage in self.parts.parameters_by_stage:
            self._rest.arm(stage)
            self._rest.start(stage)
        self._rest.finish()
        self.store.accept_gradients()

    def local_sums(self) -> list[LocalSum]:
        return first_of_each([*self._scatter.local_sums(), *self._rest.local_sums()])

    def abandon(self) -> None:
        self._scatter.abandon()
        self._rest.abandon()
