"""The parameters of one block of a model, which are whole while the block runs; each rank stores some rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from colossus.comm import shared_memory
from colossus.comm.autograd import is_recorded
from colossus.comm.pending import Pending
from colossus.comm.step_regions import GATHERS, in_region
from colossus.context.parallel_context import ParallelContext
from colossus.data_parallel.zero.flat_rows import FlatRows
from colossus.data_parallel.zero.row_forms import RowForm, rows_together
from colossus.data_parallel.zero.row_gradients import RowGradients
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
        axes: the axes over which rows are cut, where they do not shard a parameter already.
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
        axes: Sequence[str],
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
                FlatRows(params, context.state_group(form.axes_of_rows(axes)), context, form.dtypes, stage, offload)
                for form, params in _by_collective(members, axes, context)
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
    members: Sequence[PlacedParameter], axes: Sequence[str], context: ParallelContext
) -> Iterator[tuple[RowForm, list[nn.Parameter]]]:
    """Yield the parameters of each collective, and the form of the first."""
    forms = [RowForm.of(member.param, context.precision, is_product=member.is_product) for member in members]
    limit = shared_memory.flat_limit(members[0].param.device)
    for indices in rows_together(forms, axes, context.grid.sizes, limit):
        yield forms[indices[0]], [members[index].param for index in indices]
