"""The parameters of one block of a model, which are whole while the block runs; each rank stores some rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from colossus.comm import shared_memory
from colossus.comm.autograd import is_recorded
from colossus.comm.flat_buffer import chunks
from colossus.comm.pending import Pending
from colossus.comm.step_regions import GATHERS, in_region
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext
from colossus.data_parallel.zero.flat_rows import Dtypes, FlatRows
from colossus.data_parallel.zero.row_gradients import RowGradients
from colossus.layout.parameter import spec_of
from colossus.layout.split_parameter import as_shards

#: (module, name in it) under which a module holds a parameter
Place = tuple[nn.Module, str]


@dataclass(frozen=True)
class PlacedParameter:
    """A parameter with all of its places in the modules of a model.

    Attributes:
        param: the parameter.
        places: its places.
        is_product: whether all of these modules use it in products only.
    """

    param: nn.Parameter
    places: Sequence[Place]
    is_product: bool = False


class ShardedBlock:
    """Parameters that are gathered together, and whose gradients are reduced together.

    While a block is gathered, its modules have the parameters that compute uses, else the stored ones. The former are
    always the same objects. At stage 3 they have memory only while they are gathered. Below stage 3 they always have
    it, and a block is gathered once for each step or evaluation.

    Args:
        members: parameters with at least one dim, whose values are whole on each rank of the group.
        group_of: returns the ranks over which the rows of a parameter are cut.
        context: the ranks of the run.
        scope: see `colossus.tensor_parallel.gathered_weights.GatheredWeights`: ``matmul`` frees gathered parameters at
            the end of the forward, ``microbatch`` after its backward, ``step`` at the end of the step.
        stage: see `FlatRows`.
        offload: see `FlatRows`.

    Attributes:
        params: the parameters that compute uses.
        stored: parameter -> the rank's rows of it.
        summed: parameter -> the one that has the gradient of these rows; see `RowGradients`.
        is_transient: whether the block is freed, and its gradients reduced, within a step.
        in_backward: an object for each forward whose backward has begun.
        stays_for_step: whether the block stays until the end of the step, since its backward is differentiated again.
        stays_for_evaluation: whether the block stays until the end of an evaluation.
        is_whole: whether the parameters that compute uses have the values of the stored ones.
        gradients: the gradients, one object for each collective.
    """

    def __init__(
        self,
        members: Sequence[PlacedParameter],
        group_of: Callable[[nn.Parameter], AxisGroup],
        context: ParallelContext,
        scope: str,
        stage: int,
        offload: bool,
    ) -> None:
        self.params = [member.param for member in members]
        self._members, self._stage = members, stage
        self.is_transient = stage == 3 and scope != "step"
        self.frees_after_forward = stage == 3 and scope == "matmul"
        with as_shards():
            self._flats = [
                FlatRows(params, group, context, dtypes, stage, offload)
                for group, params, dtypes in _by_collective(members, group_of, context)
            ]
        self.stored = {param: stored for flat in self._flats for param, stored in flat.stored.items()}
        self.gradients = [RowGradients(flat) for flat in self._flats if flat.is_trainable]
        self.summed = self.stored | {param: own for rows in self.gradients for param, own in rows.summed.items()}
        self.in_backward: list[object] = []
        self.stays_for_evaluation = self.stays_for_step = False
        self.is_whole = self._is_placed = True
        #: the number of forwards whose backward has not run
        self._num_awaited = 0
        self._gathers: list[Pending] = []
        self.release()

    def start_gather(self) -> None:
        """Start to gather the parameters, where they are not whole."""
        if self.is_whole or self._gathers:
            return
        with as_shards(), _unrecorded():
            self._gathers = [flat.start_gather() for flat in self._flats]

    def gather(self) -> None:
        """Gather the parameters, and put them into the modules."""
        if not self.is_whole:
            self.start_gather()
            self._finish_gather()
        if not self._is_placed:
            for member in self._members:
                _put(member.places, member.param)
            self._is_placed = True

    @in_region("gather of weights: wait", GATHERS)
    def _finish_gather(self) -> None:
        gathers, self._gathers = self._gathers, []
        with as_shards(), _unrecorded():
            for pending in gathers:
                pending.wait()
        self.is_whole = True

    def drop_gather(self) -> None:
        """Wait for a gather that was started and is not needed, and free its parameters."""
        if self._gathers:
            self._finish_gather()
            self.release()

    def release(self) -> None:
        """Put the stored parameters into the modules, and free the gathered ones; below stage 3, keep their memory.

        The values in that memory are not used again, since the stored rows may change.
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
        """Put the stored parameters into the modules."""
        if self._is_placed:
            for member in self._members:
                _put(member.places, self.stored[member.param])
            self._is_placed = False

    @property
    def is_in_last_backward(self) -> bool:
        """Return whether all other forwards have had their backward."""
        return self._num_awaited == 1

    def after_forward(self) -> None:
        """Release the block after a forward, where its scope says so."""
        if self.in_backward:  # activation checkpointing has recomputed the forward: its backward is next
            return
        if torch.is_grad_enabled():
            self._num_awaited += 1
        self._release_by_scope()

    def after_backward(self, call: object) -> None:
        """Release the block after the backward of one forward, where its scope says so."""
        self.in_backward.remove(call)
        self._num_awaited -= 1
        if not self.in_backward:
            self.stays_for_evaluation = False
            self._release_by_scope()

    def _release_by_scope(self) -> None:
        is_done = self.frees_after_forward or not self._num_awaited
        if self.is_transient and is_done and not (self.stays_for_evaluation or self.stays_for_step):
            self.release()

    def end_step(self) -> None:
        """Release the block after all backwards of a step, or all forwards of an evaluation."""
        self.in_backward.clear()
        self.stays_for_evaluation = self.stays_for_step = False
        self._num_awaited = 0
        self.drop_gather()
        self.release()


def _put(places: Iterable[Place], param: nn.Parameter) -> None:
    for module, leaf in places:
        module._parameters[leaf] = param


def _unrecorded() -> AbstractContextManager[object]:
    """Return a context that hides gathers from a recorder of operations (selective activation checkpointing, say)."""
    return _disable_current_modes() if is_recorded() else nullcontext()


def _by_collective(
    members: Iterable[PlacedParameter], group_of: Callable[[nn.Parameter], AxisGroup], context: ParallelContext
) -> Iterator[tuple[AxisGroup, list[nn.Parameter], Dtypes]]:
    """Yield parameters that travel together: of the same ranks and dtypes, as many as `flat_limit` allows."""
    kinds: dict[tuple[AxisGroup, Dtypes, bool], list[nn.Parameter]] = {}
    for member in members:
        param = member.param
        dtypes = Dtypes.of(param, context.precision, is_product=member.is_product)
        kinds.setdefault((group_of(param), dtypes, param.requires_grad), []).append(param)
    for (group, dtypes, _), params in kinds.items():
        wide = max(dtypes.computed.itemsize, dtypes.reduced.itemsize)

        def nbytes(param: nn.Parameter, ranks: int = group.size, wide: int = wide) -> int:
            # with the padding of each rank's last rows, and a flag
            padding = len(spec_of(param).shards) * math.prod(param.shape[1:])
            return (param.numel() + ranks * (padding + 1)) * wide

        for chunk in chunks(params, nbytes, shared_memory.flat_limit(params[0].device)):
            yield group, chunk, dtypes
