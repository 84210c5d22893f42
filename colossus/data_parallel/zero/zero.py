"""ZeRO: data ranks share the optimizer's state, the gradients and the parameters (1910.02054)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from colossus.data_parallel.strategy import BackwardKind, Strategy
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.data_parallel.zero.prefetch import BlockRuns
from colossus.data_parallel.zero.row_gradients import RowGradients
from colossus.data_parallel.zero.sharded_block import ShardedBlock
from colossus.gradients.buckets import gradient_in_parts
from colossus.gradients.reduction import GradientReduction, ModelParts
from colossus.layout.split_parameter import as_shards
from colossus.tensor_parallel.gathered_weights import GatheredWeights, run_grad_hooks

#: how many reduce-scatters may be under way: what has been given to one is freed when it is done
_MOST = 2


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

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        grid = parts.context.grid
        data = tuple(axis for axis in grid.axes("data") if axis != "replicate")
        store.shard((*data, *grid.axes("sequence")), stage=self._stage, offload=self._offload)
        super().setup(store, parts)
        self._scatter = GradientScatter(store.blocks, store.runs, parts.parameters_by_stage, store.weights)
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


class GradientScatter:
    """One reduce-scatter for the gradients of some parameters of a block, in the same order on all ranks.

    The gradients of a block that is freed within a step are reduced at the end of each of its backwards, or when its
    weight gradients have been made, where a schedule makes them apart. Those of other blocks once in a step: in the
    order of backward, as soon as the stage's last one has made them.

    In each step, for the stages of this rank in the order of their reductions: `arm`, the stage's last backward,
    `start`; then `finish` for each stage, after which `RowGradients.summed` have their gradients.

    Args:
        blocks: all of this rank; their gradients are complete in the reversed order.
        parameters_by_stage: the parameters, as compute sees them, whose gradients are complete with each stage.
    """

    def __init__(
        self,
        blocks: Sequence[ShardedBlock],
        runs: BlockRuns,
        parameters_by_stage: Mapping[int, Sequence[nn.Parameter]],
        weights: GatheredWeights,
    ) -> None:
        self._weights, self._runs = weights, runs
        stage_of = self._stage_of = {
            id(param): stage for stage, params in parameters_by_stage.items() for param in params
        }
        self._order = list(parameters_by_stage)
        self._transient: dict[int, list[RowGradients]] = {stage: [] for stage in self._order}
        self._once: dict[int, list[RowGradients]] = {stage: [] for stage in self._order}
        #: of a parameter whose gradients are reduced once in a step
        self._reduced_with: dict[int, RowGradients] = {}
        self._block_of = {one: block for block in blocks for one in block.gradients}
        for block in reversed(blocks):
            for one in block.gradients:
                # stages are reduced in their order: with the last of those that its parameters belong to
                stage = max((stage_of[id(param)] for param in one.params), key=self._order.index)
                (self._transient if block.is_transient else self._once)[stage].append(one)
                if not block.is_transient:
                    for param in one.params:
                        self._reduced_with[id(param)] = one
                        param.register_post_accumulate_grad_hook(self._on_gradient)
        runs.on_backward = self._on_backward
        self._started: deque[RowGradients] = deque()
        #: of parameters whose gradient the last backward has made
        self._complete: set[int] = set()
        #: the stage whose last backward has begun
        self._armed: int | None = None
        #: how many of a stage's reductions have been started, and how many stages have been
        self._num_started = dict.fromkeys(self._order, 0)
        self._num_stages = 0

    def arm(self, stage: int) -> None:
        """The backward that follows is a stage's last of the step."""
        self._armed = stage

    def after_wgrad(self, stage: int) -> None:
        """The weight gradients of one backward of a stage, which its schedule makes apart, are there."""
        self._start(self._transient[stage])

    def start(self, stage: int) -> None:
        """No more gradients come for a stage: start what has not been started."""
        # what a backward of a backward has made
        self._start([one for one in self._transient[stage] if self._block_of[one].is_kept])
        self._start(self._once[stage][self._num_started[stage] :])
        self._num_started[stage] = len(self._once[stage])
        self._armed = None
        self._num_stages += 1

    def finish(self, stage: int) -> None:
        """Wait for the sums of a stage, and give each parameter its own; hooks on them are called."""
        for one in (*self._transient[stage], *self._once[stage]):
            one.wait()
            if one in self._started:
                self._started.remove(one)
            if one.are_freed and (left := [param for param in one.params if param.grad is not None]):
                raise gradient_in_parts(left[0])
            one.free()
            one.give_sums()
            for param in one.params:
                summed = one.summed[param]
                if summed.grad is not None:
                    run_grad_hooks(summed)
        self._num_stages -= 1
        self._num_started[stage] = 0
        if not self._num_stages:
            self._complete.clear()

    def _on_backward(self, block: ShardedBlock) -> None:
        # a backward that a user runs between steps is no part of one
        if self._runs.is_running and not self._weights.deferral.is_active and not block.is_kept:
            self._start(block.gradients)

    def _on_gradient(self, param: nn.Parameter) -> None:
        stage = self._armed
        if stage is None or self._stage_of[id(param)] != stage:
            return
        one, several, begin = self._reduced_with[id(param)], self._once[stage], self._num_started[stage]
        if one in several[:begin]:
            raise gradient_in_parts(param)
        self._complete.add(id(param))
        # stages before this one start theirs first; beside blocks that are gathered and reduced meanwhile, the order
        # would not be that of other ranks, where one of them uses what another does not
        if stage != self._order[self._num_stages] or self._transient[stage]:
            return
        end = begin
        while end < len(several) and all(id(param) in self._complete for param in several[end].params):
            end += 1
        self._num_started[stage] = end
        self._start(several[begin:end])

    def _start(self, several: Sequence[RowGradients]) -> None:
        with as_shards():
            for one in several:
                if one in self._started:
                    one.wait()
                    self._started.remove(one)
                elif len(self._started) == _MOST:
                    self._started.popleft().wait()
                one.start()
                self._started.append(one)
