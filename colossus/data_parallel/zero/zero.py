"""ZeRO: data ranks share the optimizer's state, the gradients and the parameters (1910.02054)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from colossus.data_parallel.strategy import BackwardKind, Strategy
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.data_parallel.zero.row_gradients import RowGradients
from colossus.data_parallel.zero.sharded_block import ShardedBlock
from colossus.gradients.buckets import gradient_in_parts
from colossus.gradients.reduction import GradientReduction, ModelParts
from colossus.layout.split_parameter import as_shards
from colossus.tensor_parallel.gathered_weights import run_grad_hooks

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

    The gradients of a block that is freed within a step are reduced at the end of each of its backwards, or when its
    weight gradients have been made, where a schedule makes them apart. Those of other blocks once in a step: in the
    order of backward, as soon as the stage's last one has made them. All ranks reduce in the same order.

    Args:
        stage: 1, 2 or 3.
        offload: rows, and with them the optimizer's state, are in the memory of the host.
    """

    def __init__(self, stage: int, offload: bool = False) -> None:
        self._stage, self._offload = stage, offload

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        grid = parts.context.grid
        data = tuple(axis for axis in grid.axes("data") if axis != "replicate")
        store.shard((*data, *grid.axes("sequence")), stage=self._stage, offload=self._offload)
        super().setup(store, parts)
        by_stage = parts.parameters_by_stage
        summed = replace(
            parts,
            parameters_by_stage={
                stage: [store.summed(param) for param in params] for stage, params in by_stage.items()
            },
            tied=[(store.summed(param), ranks) for param, ranks in parts.tied],
        )
        self._rest = GradientReduction(summed, self.summed_axes)
        self._order = list(by_stage)
        self._stage_of = {id(param): stage for stage, params in by_stage.items() for param in params}
        #: of each stage the gradients that are reduced in each backward, and those that are once in a step
        self._transient: dict[int, list[RowGradients]] = {stage: [] for stage in by_stage}
        self._once: dict[int, list[RowGradients]] = {stage: [] for stage in by_stage}
        #: of a parameter whose gradients are reduced once in a step
        self._reduced_with: dict[int, RowGradients] = {}
        self._block_of = {one: block for block in store.blocks for one in block.gradients}
        for block in reversed(store.blocks):  # the order in which gradients are complete
            for one in block.gradients:
                # stages are reduced in their order: with the last of those that its parameters belong to
                stage = max((self._stage_of[id(param)] for param in one.params), key=self._order.index)
                (self._transient if block.is_transient else self._once)[stage].append(one)
                if not block.is_transient:
                    for param in one.params:
                        self._reduced_with[id(param)] = one
                        hook = param.register_post_accumulate_grad_hook(self._on_gradient)
                        parts.closing.callback(hook.remove)
        store.runs.on_backward = self._on_backward
        self._started: deque[RowGradients] = deque()
        #: of parameters whose gradient the last backward has made
        self._complete: set[int] = set()
        #: the stage whose last backward has begun
        self._armed: int | None = None
        #: how many of a stage's reductions have been started, and how many stages have been
        self._num_started = dict.fromkeys(by_stage, 0)
        self._num_stages = 0

    def after_backward(self, stage: int, microbatch: int, kind: BackwardKind) -> None:
        if kind == "backward_weight":
            self._start(self._transient[stage])

    def last_backward(self, stage: int) -> None:
        self._armed = stage

    def reduce(self, stage: int) -> None:
        # what a backward of a backward has made
        self._start([one for one in self._transient[stage] if self._block_of[one].is_kept])
        self._start(self._once[stage][self._num_started[stage] :])
        self._num_started[stage] = len(self._once[stage])
        self._armed = None
        self._num_stages += 1

    def finish(self) -> None:
        """Wait for the sums, and give each parameter its own; hooks on them are called."""
        for one in self._gradients():
            one.wait()
            if one.are_freed and (left := [param for param in one.params if param.grad is not None]):
                raise gradient_in_parts(left[0])
            one.free()
            one.give_sums()
            for param in one.params:
                summed = one.summed[param]
                if summed.grad is not None:
                    run_grad_hooks(summed)
        self._started.clear()
        self._complete.clear()
        self._num_started, self._num_stages = dict.fromkeys(self._order, 0), 0
        for stage in self._order:
            self._rest.prepare(stage)
            self._rest.start(stage)
        self._rest.finish()
        self.store.accept_gradients()

    def _gradients(self) -> list[RowGradients]:
        return [one for stage in self._order for one in (*self._transient[stage], *self._once[stage])]

    def _on_backward(self, block: ShardedBlock) -> None:
        # a backward that a user runs between steps is no part of one
        if self.store.runs.is_running and not self.store.weights.deferral.is_active and not block.is_kept:
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
