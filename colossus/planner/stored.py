"""What the ranks of a pipeline stage store: weights, gradients and their buffers, the state of the optimizer."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from colossus.config import Config
from colossus.context.parallel_context import ParallelContext
from colossus.data_parallel.zero.blocks import by_block
from colossus.data_parallel.zero.flat_rows import Dtypes
from colossus.data_parallel.zero.sharded_block import HeldParameter
from colossus.data_parallel.zero.zero_memory import ParameterSize, zero_memory
from colossus.engine.optimizers import holders_of, make_optimizer
from colossus.engine.parameter_groups import ParameterGroups
from colossus.gradients.buckets import gradient_sum_axes
from colossus.layers.pipeline_block import NamedBlock
from colossus.layout.parameter import StoredSpec, attach, spec_of
from colossus.optim.logical_tensors import Holders
from colossus.planner.fake_tensors import CountedFakeTensors
from colossus.planner.rank_memory import StoredBytes
from colossus.registry import STRATEGIES
from colossus.tensor_parallel.dtypes import gradient_dtype


class StoredParameters:
    """The parameters of one pipeline rank, as its data-parallel strategy stores them.

    Args:
        model: whole, of fake tensors; its layers have recorded over which axes gradients are summed, which the first
            forward does.
        names: of the parameters of the rank, and whether other pipeline ranks have them, too.
        chain: blocks of the rank; None of a model that is no chain.
        buffer_bytes: of the rank's buffers.
    """

    def __init__(
        self,
        config: Config,
        context: ParallelContext,
        model: nn.Module,
        names: Mapping[str, bool],
        chain: list[NamedBlock] | None,
        buffer_bytes: int,
    ) -> None:
        self._config, self._context, self._model, self._buffer_bytes = config, context, model, buffer_bytes
        is_exact = STRATEGIES.build(config.parallel.data_strategy).exact
        self._summed_axes = context.grid.names if is_exact else context.replica_axes
        params = dict(model.named_parameters())
        self.params = [params[name] for name in names]
        self._ids = {id(param) for param in self.params}
        self._tied = {id(params[name]) for name, is_tied in names.items() if is_tied}
        zero, grid = config.parallel.zero, context.grid
        data = (axis for axis in grid.axes("data") if axis != "replicate")
        self._axes = tuple(axis for axis in (*data, *grid.axes("sequence")) if grid.sizes[axis] > 1)
        self.stage = zero.stage
        if not self._axes and zero.stage:
            is_one = context.precision.params == context.precision.optimizer and not zero.offload
            self.stage = 0 if is_one else min(zero.stage, 2)
        self._blocks, self._root = by_block(model, chain, self._takes) if self.stage else ([], [])
        held = [one for _, block in self._blocks for one in block] + self._root
        self._cut = {id(one.param): one for one in held}

    def _takes(self, param: nn.Parameter) -> bool:
        return id(param) in self._ids and bool(self.stage == 3 or param.requires_grad)

    def count(self, groups: ParameterGroups | None, fake: CountedFakeTensors, *, accumulates: bool) -> StoredBytes:
        """The bytes of the rank.

        Args:
            groups: of the optimizer.
            accumulates: whether there are several microbatches, over which gradients are summed.
        """
        whole = [param for param in self.params if id(param) not in self._cut]
        weights = sum(param.nbytes for param in whole) + self._buffer_bytes
        trained = [param for param in whole if param.requires_grad]
        gradients = between = sum(_gradient_bytes(param) for param in trained)
        gathered = buffers = on_host = reduced = 0
        if self.stage:
            sizes = [[self._size(one) for one in block] for _, block in self._blocks]
            root = [self._size(one) for one in self._root]
            zero, scope = self._config.parallel.zero, self._config.parallel.tensor.weights
            memory = zero_memory(sizes, root, stage=self.stage, scope=scope, states=0, offload=zero.offload)
            weights += memory.whole + memory.stored
            gathered = memory.whole_peak - memory.whole
            gradients, between = gradients + memory.gradients_peak, between + memory.gradients
            reduced = memory.gradients + _buffers_of(sizes, root)
            if self.stage == 3 and scope != "step":  # while activations are there, too
                gradients, buffers, reduced = gradients + memory.gradients, reduced - memory.gradients, 0
            on_host = memory.stored if zero.offload else 0
        else:
            buffers += self._in_buckets([param for param in trained if self.is_bucketed(param)])
            if not accumulates:  # a gradient is in its bucket as soon as it is made
                gradients -= sum(_gradient_bytes(param) for param in trained if self.is_bucketed(param))
        buffers += self._in_buckets([param for param in trained if id(param) in self._tied])
        optimizer, update = self._optimizer_bytes(groups, fake)
        on_host += optimizer if self._config.parallel.zero.offload and self.stage else 0
        update = max(update, reduced)
        return StoredBytes(weights, gathered, gradients, buffers, optimizer, update, between, on_host)

    def is_bucketed(self, param: nn.Parameter) -> bool:
        """Whether the gradient of a parameter is summed over ranks in a bucket."""
        return not self.stage and bool({*gradient_sum_axes(param, self._context)} & {*self._summed_axes})

    def _in_buckets(self, params: list[nn.Parameter]) -> int:
        """Their gradients, and a flag behind each."""
        reduced = self._context.precision.reduce_dtype
        return sum((param.numel() + 1) * reduced(gradient_dtype(param)).itemsize for param in params)

    def _size(self, held: HeldParameter) -> ParameterSize:
        param = held.param
        dtypes = Dtypes.of(param, self._context.precision, is_product=held.is_product)
        rows = tuple(stop - start for start, stop in (shard.rows for shard in spec_of(param).shards))
        widths = dtypes.computed.itemsize, dtypes.stored.itemsize, dtypes.gradient.itemsize
        ranks = self._context.grid.size(self._axes_of(param))
        return ParameterSize(tuple(param.shape), rows, ranks, *widths, param.requires_grad)

    def _axes_of(self, param: nn.Parameter) -> tuple[str, ...]:
        cut = spec_of(param).layout.shard_axes
        return tuple(axis for axis in self._axes if axis not in cut)

    def _as_stored(self, param: nn.Parameter) -> nn.Parameter:
        """As the optimizer has it, with a gradient."""
        held = self._cut.get(id(param))
        shape, dtype, spec = tuple(param.shape), param.dtype, spec_of(param)
        if held is not None:
            dtype = Dtypes.of(param, self._context.precision, is_product=held.is_product).stored
            shape = (sum(-(-rows // self._size(held).ranks) for rows in self._size(held).rows), *param.shape[1:])
            spec = StoredSpec(spec, self._axes_of(param), self._context.grid.sizes)
        stored = attach(nn.Parameter(torch.empty(shape, dtype=dtype)), spec)
        stored.grad = torch.empty_like(stored)
        return stored

    def _optimizer_bytes(self, groups: ParameterGroups | None, fake: CountedFakeTensors) -> tuple[int, int]:
        """What the optimizer keeps, and what it needs on top while it steps: found out by a step of fake tensors."""
        trained = [param for param in self.params if param.requires_grad]
        named = [(spec_of(param).name, self._as_stored(param)) for param in trained]
        if not named:
            return 0, 0
        context, before = self._context, fake.live
        holders = holders_of(self._model, context, self._summed_axes)
        pairs = zip(trained, named, strict=True)
        tables = [id(stored) for param, (_, stored) in pairs if id(param) in holders.tables]
        holders = Holders(context, holders.axes, tables)
        optimizer: Any = make_optimizer(None, self._config, named, holders, groups)
        fake.mark()
        optimizer.step()
        peak = fake.peak
        gc.collect()  # what an optimizer's loops have left
        return fake.live - before, peak - fake.live


def _gradient_bytes(param: nn.Parameter) -> int:
    return param.numel() * gradient_dtype(param).itemsize


def _buffers_of(blocks: list[list[ParameterSize]], root: list[ParameterSize]) -> int:
    """Of ZeRO: gradients of two blocks that are being reduced, and the rows of a block as they arrive."""
    every = [block for block in (*blocks, root) if block]
    reduced = sorted(sum(one.elements * one.gradient for one in block if one.is_trainable) for block in every)[-2:]
    arriving = max((sum(one.elements * one.computed for one in block) for block in every), default=0)
    return sum(reduced) + arriving
