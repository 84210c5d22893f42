"""The store of a model's parameters, between their stored form and the form that compute sees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest

import torch
from torch import nn

from colossus.comm import collectives
from colossus.comm.autograd import uncompiled
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext
from colossus.data_parallel.zero.blocks import by_block, in_buckets
from colossus.data_parallel.zero.prefetch import BlockRuns, ModuleHook, run_around
from colossus.data_parallel.zero.row_forms import stage_in_effect
from colossus.data_parallel.zero.row_gradients import RowGradients
from colossus.data_parallel.zero.sharded_block import ShardedBlock
from colossus.layers.pipeline_block import NamedBlock
from colossus.layout.parameter import spec_of
from colossus.layout.parameter_hooks import POST_ACCUMULATE, user_hooks
from colossus.layout.split_parameter import as_shards
from colossus.rows.row_gradient import row_source
from colossus.tensor_parallel.gathered_weights import GatheredWeights, run_grad_hooks


class ParameterStore:
    """The stored parameters, which the optimizer and checkpoints see, and those that compute sees.

    The two are the same until a strategy calls `shard`. From then on ``model.parameters()`` are a rank's rows, and the
    blocks of the model gather their parameters while they run. Parameters of no block, or of several, belong to the
    root block, which is gathered for a whole step or evaluation. Blocks that are whole for a step are gathered where
    they first run in it if the model is a chain, whose blocks use no parameters of others; else before the first runs.

    Tensor parallelism gathers further from there, by ``weights``.

    Args:
        model: this rank's part of the model.
        context: the ranks.
        weights: the gathered weights of the model's layers.
        chain: returns the blocks of the model on this rank, or None where it is no chain of blocks.

    Attributes:
        blocks: the blocks in the order of the model, after the root block, whose gradients are complete last.
        runs: gathers blocks as they run.
    """

    def __init__(
        self,
        model: nn.Module,
        context: ParallelContext,
        weights: GatheredWeights,
        chain: Callable[[], Sequence[NamedBlock] | None],
    ) -> None:
        self.weights = weights
        self._model, self._context, self._chain = model, context, chain
        self.blocks: list[ShardedBlock] = []
        #: the blocks that stay whole for a whole step, and those of them that are gathered when they first run
        self._lasting: list[ShardedBlock] = []
        self._late: set[ShardedBlock] = set()
        self.runs = BlockRuns()
        self._group: AxisGroup | None = None
        #: parameter that compute sees -> the stored one, and the one that has the stored one's gradient
        self._stored_as: dict[nn.Parameter, nn.Parameter] = {}
        self._summed_as: dict[nn.Parameter, nn.Parameter] = {}
        self._stored = list(model.parameters())

    def parameters(self) -> list[nn.Parameter]:
        """Return all stored parameters of this rank, in the model's order."""
        return list(self._stored)

    def trainable(self) -> list[nn.Parameter]:
        """Return the stored parameters that get a gradient."""
        return [param for param in self._stored if param.requires_grad]

    def stored(self, param: nn.Parameter) -> nn.Parameter:
        """Return the stored parameter of one that compute sees."""
        return self._stored_as.get(param, param)

    def computed(self, stored: nn.Parameter) -> nn.Parameter:
        """Return the parameter that compute sees of a stored one."""
        return next((param for param, other in self._stored_as.items() if other is stored), stored)

    def summed(self, param: nn.Parameter) -> nn.Parameter:
        """Return the parameter that has the gradient of `stored`, on compute's device, until `accept_gradients`."""
        return self._summed_as.get(param, param)

    def shard(self, axes: Iterable[str], *, stage: int = 3, offload: bool = False) -> None:
        """Store every parameter in rows that are cut over these axes. Collective, like all forwards from then on.

        A parameter that some of the axes split already (an expert's) is cut over the others. Scalars, and tables with
        a `RowSource`, are not cut. Where the axes have one rank, parameters are stored apart only if the optimizer's
        precision is another one.

        Args:
            axes: the axes.
            stage: the stage of ZeRO. 3: parameters are whole while their block runs. 2: they keep their memory, and are
                gathered once for each step or evaluation; frozen parameters are not cut. 1: whole gradients stay until
                the step ends, too.
            offload: whether the rows, which the optimizer updates, are in the memory of the host.
        """
        assert not self.blocks, "the parameters are sharded already"
        context = self._context
        group = context.state_group(tuple(axis for axis in context.grid.axes(axes) if context.grid.sizes[axis] > 1))
        is_copied = offload or context.precision.params != context.precision.optimizer
        stage = stage_in_effect(stage, group.size, is_copied=is_copied)
        if not stage:
            return
        self._group = group

        def takes(param: nn.Parameter) -> bool:
            return row_source(param) is None and (stage == 3 or param.requires_grad)

        chain = self._chain()
        blocks, root = by_block(self._model, chain, takes)
        is_transient = stage == 3 and self.weights.scope != "step"
        for modules, members in in_buckets(blocks, lambda member: member.param.nbytes, stays=not is_transient):
            block = ShardedBlock(members, group.axes, context, self.weights.scope, stage, offload)
            if is_transient and (hooked := [param for param in block.params if user_hooks(param, POST_ACCUMULATE)]):
                raise ValueError(
                    f"{spec_of(hooked[0]).name} has a hook of register_post_accumulate_grad_hook, which gets the sum "
                    f"of a step's microbatches, but parallel.zero = 3 reduces the gradient of each and frees it: use "
                    f"register_hook, or parallel.zero = 2 or less"
                )
            for module in modules:
                if is_transient:
                    run_around(module, block, self.runs)
                elif chain is not None:
                    self._gather_before(module, block)
            self.blocks.append(block)
        if root:
            self.blocks.insert(0, ShardedBlock(root, group.axes, context, "step", stage, offload))
        self._lasting = [block for block in self.blocks if not block.is_transient]
        model = self._model
        model.register_forward_pre_hook(ModuleHook(model, lambda *_: self._before_model()), prepend=True)
        model.register_forward_hook(ModuleHook(model, lambda *_: self._after_model()))
        for block in self.blocks:
            self._stored_as |= block.stored
            self._summed_as |= block.summed
        self._stored = list(self._model.parameters())

    def _gather_before(self, module: nn.Module, block: ShardedBlock) -> None:
        """Gather a lasting block when this module runs in a step, and start the gather of the next."""

        def before(*_: object) -> None:
            if self.runs.is_running:
                for following in self._lasting[self._lasting.index(block) + 1 :][:1]:
                    following.start_gather()
                block.gather()

        self._late.add(block)
        module.register_forward_pre_hook(ModuleHook(module, uncompiled(before)), prepend=True)

    def accept_gradients(self) -> None:
        """Give the stored parameters their complete sums; for parameters on the host, wait once for the copies."""
        on_host = [param for gradients in self._gradients() for param in gradients.send_to_host()]
        device = self._context.device
        if on_host and device.type != "cpu":  # this also waits for the gathers' copies of rows to the device
            torch.get_device_module(device).current_stream(device).synchronize()
        for param in on_host:
            run_grad_hooks(param)

    def accept_whole_gradients(self) -> None:
        """Give the stored parameters the gradients of those that compute sees, where a rank stores all rows."""
        for gradients in self._gradients():
            gradients.set_whole()

    def _gradients(self) -> Iterator[RowGradients]:
        for block in self.blocks:
            yield from block.gradients

    # -- a step or an evaluation --------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Drop the gradients of the step before, also of parameters that the engine's optimizer does not have."""
        self._begin_run()
        for param in self._stored:
            param.grad = None
        with as_shards():
            for gradients in self._gradients():
                gradients.begin_step()
        self.weights.begin_step()

    def begin_evaluation(self, num_forwards: int) -> None:
        """Prepare for the ``num_forwards`` forwards of an evaluation on this rank.

        Where data ranks have different numbers of forwards, these cannot gather: all blocks are gathered here.
        """
        self._begin_run()
        if self._group is None:
            return
        self.gather_lasting(at_once=True)  # here, since a rank without samples runs no stage
        if any(block.is_transient for block in self.blocks):
            counts = torch.tensor([num_forwards, -num_forwards], device=self._context.device)
            most, least = collectives.all_reduce(counts, self._group, op="max", owned=True).wait().tolist()
            for block in self.blocks if most != -least else ():
                block.gather()
                block.stays_for_evaluation = True

    def _begin_run(self) -> None:
        self.release()
        self.runs.is_running = True

    def begin_action(self) -> None:
        """Begin a forward or a backward of a stage."""
        if self.blocks:
            self.runs.begin()

    def gather_lasting(self, *, at_once: bool = False) -> None:
        """Gather the blocks that are whole for a step or an evaluation, each while the next travels.

        Args:
            at_once: gather all of them, also those that would be gathered when they run.
        """
        for block, following in zip_longest(self._lasting, self._lasting[1:]):
            if block in self._late and not at_once:
                block.start_gather()
                return
            if following is not None:
                following.start_gather()
            block.gather()

    def after_backward(self) -> None:
        """End a stage's backward, also for blocks whose inputs get no gradient."""
        self.runs.leave_all()

    def end_step(self) -> None:
        """Reduce the gradients that layers have deferred, and free gathered parameters, after all backwards."""
        self.weights.end_step()
        self.release()

    def release(self) -> None:
        """Free gathered parameters, and wait for gathers that were started ahead."""
        for block in self.blocks:
            block.end_step()
        self.runs.reset()
        self.runs.is_running = False

    # -- a model that is called outside of a step -----------------------------------------------------------

    def _before_model(self) -> None:
        if not self.runs.is_running:
            if not torch.is_grad_enabled():
                self.release()
            self.runs.begin()
        self.gather_lasting(at_once=not self.runs.is_running)

    def _after_model(self) -> None:
        if self.runs.is_running:
            return
        if not torch.is_grad_enabled():
            self.release()
        for block in self.blocks:  # a backward may need the whole parameters, but a state dict has the stored ones
            block.unplace()
