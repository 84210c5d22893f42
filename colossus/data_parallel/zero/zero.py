"""ZeRO: data ranks share the optimizer's state, the gradients and the parameters (1910.02054)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from colossus.data_parallel.strategy import BackwardKind, Strategy
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.data_parallel.zero.row_forms import axes_of_zero
from colossus.data_parallel.zero.row_gradients import RowGradients
from colossus.data_parallel.zero.sharded_block import ShardedBlock
from colossus.gradients.buckets import gradient_in_parts
from colossus.gradients.reduction import GradientReduction, ModelParts
from colossus.layout.split_parameter import as_shards
from colossus.tensor_parallel.gathered_weights import run_grad_hooks

#: the most reduce-scatters under way, each of which keeps its input alive
MAX_REDUCTIONS = 2


class Zero(Strategy):
    """ZeRO: each rank along data and sequence stores rows of every parameter, and updates them. It is exact.

    | stage | stored by rows | whole |
    |---|---|---|
    | 1 | optimizer state | parameters; gradients until the step ends |
    | 2 | also gradients | parameters; the gradients of a block until they are reduced |
    | 3 | also parameters | the parameters of a block while it runs; those of the root block for the step |

    A gradient is reduce-scattered to rows over these axes, and the rows are summed over the other axes. Along data all
    ranks share the rows, or those along ``shard`` where the context has the axes ``replicate`` and ``shard`` (HSDP,
    2304.11277).

    The gradients of a block that is freed within a step are reduced at the end of each of its backwards, or of its
    wgrad where a schedule splits backwards. Those of other blocks are reduced once in a step, in the order of backward,
    as soon as the stage's last backward has made them. All ranks reduce in the same order. The rows of a block are
    summed over other axes as soon as its last reduction in a step has ended.

    Args:
        stage: 1, 2 or 3.
        offload: whether rows, and with them the optimizer's state, are in the memory of the host.
    """

    def __init__(self, stage: int, offload: bool = False) -> None:
        self._stage, self._offload = stage, offload

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        store.shard(axes_of_zero(parts.context.grid), stage=self._stage, offload=self._offload)
        super().setup(store, parts)
        by_stage = parts.parameters_by_stage
        transient = {param for block in store.blocks if block.is_transient for param in block.params}
        summed = replace(
            parts,
            parameters_by_stage={  # those of transient blocks last, as buckets are filled in reverse
                stage: [store.summed(param) for param in sorted(params, key=lambda param: param in transient)]
                for stage, params in by_stage.items()
            },
            tied=[(store.summed(param), ranks) for param, ranks in parts.tied],
        )
        self._rest = GradientReduction(summed, self.summed_axes)
        self._order = list(by_stage)
        self._stage_of = {id(param): stage for stage, params in by_stage.items() for param in params}
        #: stage -> the gradients that are reduced in each backward, and those that are reduced once in a step
        self._transient: dict[int, list[RowGradients]] = {stage: [] for stage in by_stage}
        self._once: dict[int, list[RowGradients]] = {stage: [] for stage in by_stage}
        #: id of a parameter -> its gradients, where they are reduced once in a step
        self._reduced_with: dict[int, RowGradients] = {}
        self._block_of = {gradients: block for block in store.blocks for gradients in block.gradients}
        for block in reversed(store.blocks):  # the order in which gradients are complete
            for gradients in block.gradients:
                # stages are reduced in their order, and these gradients with the last stage of their parameters
                stage = max((self._stage_of[id(param)] for param in gradients.params), key=self._order.index)
                (self._transient if block.is_transient else self._once)[stage].append(gradients)
                if not block.is_transient:
                    for param in gradients.params:
                        self._reduced_with[id(param)] = gradients
                        hook = param.register_post_accumulate_grad_hook(self._on_gradient)
                        parts.closing.callback(hook.remove)
        store.runs.on_backward = self._on_backward
        self._started: deque[RowGradients] = deque()
        #: ids of parameters whose gradient the last backward has made
        self._complete: set[int] = set()
        #: the stage whose last backward of the step runs
        self._current: int | None = None
        #: the number of reductions that each stage has started, and the number of stages that have started all theirs
        self._num_started = dict.fromkeys(by_stage, 0)
        self._num_stages = 0
        #: gradients whose last reduction in the step has started, and those of them whose sums have been set
        self._last: set[RowGradients] = set()
        self._set: set[RowGradients] = set()

    def after_backward(self, stage: int, microbatch: int, kind: BackwardKind) -> None:
        if kind == "backward_weight":
            self._start(self._transient[stage])

    def last_backward(self, stage: int) -> None:
        self._current = stage
        self._rest.prepare(stage)

    def reduce(self, stage: int) -> None:
        # blocks whose backward is differentiated again (create_graph=True) stay whole, and are reduced only here
        self._start([grads for grads in self._transient[stage] if self._block_of[grads].stays_for_step])
        self._start(self._once[stage][self._num_started[stage] :])
        self._num_started[stage] = len(self._once[stage])
        self._current = None
        self._num_stages += 1

    def finish(self) -> None:
        """Wait for the sums, set the gradient of each parameter, and call the hooks on it."""
        for gradients in self._all_gradients():
            gradients.wait()
            if gradients.are_freed and (late := [param for param in gradients.params if param.grad is not None]):
                raise gradient_in_parts(late[0])
            if gradients not in self._set:
                self._set_sums(gradients)
        self._started.clear()
        self._complete.clear()
        self._last.clear()
        self._set.clear()
        self._num_started, self._num_stages = dict.fromkeys(self._order, 0), 0
        for stage in self._order:
            self._rest.start(stage)
        self._rest.finish()
        self.store.accept_gradients()

    def _set_sums(self, gradients: RowGradients) -> None:
        """Give parameters their sums, whose further sums over other axes may start."""
        gradients.free()
        gradients.set_sums()
        for param in gradients.params:
            summed = gradients.summed[param]
            if summed.grad is not None:
                run_grad_hooks(summed)

    def _wait(self, gradients: RowGradients) -> None:
        gradients.wait()
        if gradients in self._last and self._rest.has_sums:
            self._set_sums(gradients)
            self._set.add(gradients)

    def _all_gradients(self) -> list[RowGradients]:
        return [gradients for stage in self._order for gradients in (*self._transient[stage], *self._once[stage])]

    def _on_backward(self, block: ShardedBlock) -> None:
        # a user may run backwards between steps, which are not reduced
        if self.store.runs.is_running and not self.store.weights.deferral.is_active and not block.stays_for_step:
            self._start(block.gradients)
            if self._current is not None and block.is_in_last_backward:
                self._last.update(grads for grads in block.gradients if grads in self._transient[self._current])

    def _on_gradient(self, param: nn.Parameter) -> None:
        stage = self._current
        if stage is None or self._stage_of[id(param)] != stage:
            return
        in_order, begin = self._once[stage], self._num_started[stage]
        if self._reduced_with[id(param)] in in_order[:begin]:
            raise gradient_in_parts(param)
        self._complete.add(id(param))
        # stages before this one start theirs first. Beside transient blocks, which are gathered and reduced meanwhile,
        # the order could differ between ranks that use different parameters
        if stage != self._order[self._num_stages] or self._transient[stage]:
            return
        end = begin
        while end < len(in_order) and all(id(param) in self._complete for param in in_order[end].params):
            end += 1
        self._num_started[stage] = end
        self._start(in_order[begin:end])

    def _start(self, reductions: Sequence[RowGradients]) -> None:
        with as_shards():
            for gradients in reductions:
                if gradients in self._set:
                    raise gradient_in_parts(gradients.params[0])
                if gradients in self._started:
                    gradients.wait()
                    self._started.remove(gradients)
                elif len(self._started) == MAX_REDUCTIONS:
                    self._wait(self._started.popleft())
                gradients.start()
                self._started.append(gradients)
