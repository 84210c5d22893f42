"""The parameters of one block of a model, of which a rank stores some rows: whole while the block runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from colossus.comm.autograd import is_recorded
from colossus.comm.pending import Pending
from colossus.comm.shared_memory import SLOT_BYTES
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext
from colossus.data_parallel.zero.flat_rows import Dtypes, FlatRows
from colossus.data_parallel.zero.row_gradients import RowGradients
from colossus.layout.parameter import spec_of
from colossus.layout.split_parameter import as_shards

#: (module, name in it) under which a module holds a parameter
Place = tuple[nn.Module, str]


@dataclass(frozen=True)
class HeldParameter:
    """A parameter with all places where the modules of a model hold it.

    Attributes:
        is_product: whether all of them take products of it, and nothing else.
    """

    param: nn.Parameter
    places: Sequence[Place]
    is_product: bool = False


class ShardedBlock:
    """Parameters that are gathered, and whose gradients are reduced, together.

    In a step or an evaluation the modules of a block that has been gathered hold the parameters that compute uses, else
    the stored ones. The former are always the same objects. Their memory is there while they are gathered only, or
    (below stage 3) always: then a block is gathered once for each step or evaluation.

    Args:
        held: parameters with at least one dim, their values whole on each rank of the group.
        group_of: the ranks over which the rows of a parameter are cut.
        scope: as of `colossus.tensor_parallel.gathered_weights.GatheredWeights`: ``matmul`` frees what forward gathered
            at its end, ``microbatch`` after its backward, ``step`` at the end of the step.
        stage, offload: see `FlatRows`.

    Attributes:
        stored: the rank's rows of each parameter.
        summed: what has the gradient of these rows; see `RowGradients`.
        is_transient: whether the block is freed, and its gradients reduced, within a step.
        in_backward: an object for each forward whose backward has begun.
        is_kept: whether the block is not freed before the end of the step: its backward is differentiated again.
        is_held: whether the block is not freed before the end of an evaluation.
        is_whole: whether the parameters that compute uses have the values of the stored ones.
        gradients: those that travel in one collective, for each such.
    """

    def __init__(
        self,
        held: Sequence[HeldParameter],
        group_of: Callable[[nn.Parameter], AxisGroup],
        context: ParallelContext,
        scope: str,
        stage: int,
        offload: bool,
    ) -> None:
        self.params = [one.param for one in held]
        self._held, self._stage = held, stage
        self.is_transient = stage == 3 and scope != "step"
        self.frees_after_forward = stage == 3 and scope == "matmul"
        with as_shards():
            self._flats = [
                FlatRows(params, group, context, dtypes, stage, offload)
                for group, params, dtypes in _travelling_together(held, group_of, context)
            ]
        self.stored = {param: stored for flat in self._flats for param, stored in flat.stored.items()}
        self.gradients = [RowGradients(flat) for flat in self._flats if flat.is_trainable]
        self.summed = self.stored | {param: own for each in self.gradients for param, own in each.summed.items()}
        self.in_backward: list[object] = []
        self.is_held = self.is_kept = False
        self.is_whole = self._is_placed = True
        #: forwards whose backward has not run
        self._num_awaited = 0
        self._gathers: list[Pending] = []
        self.release()

    def start_gather(self) -> None:
        """Start to make the parameters whole, where they are not."""
        if self.is_whole or self._gathers:
            return
        with as_shards(), _unrecorded():
            self._gathers = [flat.start_gather() for flat in self._flats]

    def gather(self) -> None:
        """Make the parameters whole, and let the modules hold them."""
        if not self.is_whole:
            self.start_gather()
            self._finish_gather()
        if not self._is_placed:
            for one in self._held:
                _put(one.places, one.param)
            self._is_placed = True

    def _finish_gather(self) -> None:
        gathers, self._gathers = self._gathers, []
        with as_shards(), _unrecorded():
            for pending in gathers:
                pending.wait()
        self.is_whole = True

    def drop_gather(self) -> None:
        """A gather that was started is not wanted any more: wait for it, and free what has come."""
        if self._gathers:
            self._finish_gather()
            self.release()

    def release(self) -> None:
        """Let the modules hold the stored parameters, and free the gathered ones, or keep their memory only.

        What is kept is not relied on: an optimizer, a load or a user may have written to the stored rows.
        """
        self.unplace()
        if not self.is_whole:
            return
        with as_shards():
            for flat in self._flats:
                flat.take_back_changes()
                if self._stage == 3:
                    flat.release()
        self.is_whole = False

    def unplace(self) -> None:
        """Let the modules hold the stored parameters."""
        if self._is_placed:
            for one in self._held:
                _put(one.places, self.stored[one.param])
            self._is_placed = False

    def after_forward(self) -> None:
        """A forward that a backward may follow is over."""
        if self.in_backward:  # activation checkpointing has recomputed it: its backward is next
            return
        if torch.is_grad_enabled():
            self._num_awaited += 1
        self._release_by_scope()

    def after_backward(self, call: object) -> None:
        """The backward of one forward is over."""
        self.in_backward.remove(call)
        self._num_awaited -= 1
        if not self.in_backward:
            self.is_held = False
            self._release_by_scope()

    def _release_by_scope(self) -> None:
        is_done = self.frees_after_forward or not self._num_awaited
        if self.is_transient and is_done and not (self.is_held or self.is_kept):
            self.release()

    def end_step(self) -> None:
        """All backwards of a step, or all forwards of an evaluation, are over."""
        self.in_backward.clear()
        self.is_held = self.is_kept = False
        self._num_awaited = 0
        self.drop_gather()
        self.release()


def _put(places: Iterable[Place], param: nn.Parameter) -> None:
    for module, leaf in places:
        module._parameters[leaf] = param


def _unrecorded() -> AbstractContextManager[object]:
    """What moves parameters is no part of what a recorder (of selective activation checkpointing, say) is to see."""
    return _disable_current_modes() if is_recorded() else nullcontext()


def _travelling_together(
    held: Iterable[HeldParameter], group_of: Callable[[nn.Parameter], AxisGroup], context: ParallelContext
) -> Iterator[tuple[AxisGroup, list[nn.Parameter], Dtypes]]:
    """Parameters of the same ranks and dtypes, on CPU as many as fit a slot of shared memory."""
    kinds: dict[tuple[AxisGroup, Dtypes, bool], list[nn.Parameter]] = {}
    for one in held:
        dtypes = Dtypes.of(one.param, context.precision, is_product=one.is_product)
        kinds.setdefault((group_of(one.param), dtypes, one.param.requires_grad), []).append(one.param)
    for (group, dtypes, _), params in kinds.items():
        wide = max(dtypes.computed.itemsize, dtypes.reduced.itemsize)
        chunk: list[nn.Parameter] = []
        size = 0
        for param in params:
            # with the padding of each rank's last rows, and a flag
            padding = len(spec_of(param).shards) * math.prod(param.shape[1:])
            nbytes = (param.numel() + group.size * (padding + 1)) * wide
            if chunk and param.device.type == "cpu" and size + nbytes > SLOT_BYTES:
                yield group, chunk, dtypes
                chunk, size = [], 0
            chunk.append(param)
            size += nbytes
        yield group, chunk, dtypes
