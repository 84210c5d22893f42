"""The data axis of a run: what replicas exchange, and when."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.context.parallel_context import ParallelContext
from colossus.data_parallel.update import scale_gradients, skipping_on_device
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.gradients.gradient_norm import GradientNorm
from colossus.gradients.reduction import ModelParts
from colossus.sparse.choice import Survey
from colossus.sparse.tables import Tables

#: a backward of inputs and weights (dgrad and wgrad), or one of its halves under a schedule that splits them
BackwardKind = Literal["backward", "backward_input", "backward_weight"]


class Strategy:
    """Base of the data-parallel strategies: this one exchanges nothing.

    A *replica* is a whole copy of the model: all ranks but those along ``data``. An *exact* strategy keeps replicas
    equal, and a step's numbers are those of the global batch: it is a subclass of `AllReduce`, or of this. An inexact
    one has parameters per replica; it sums gradients inside of the replica, and its steps are divided and clipped by
    the replica's own count and norm: a subclass of `PerReplica` (`Gossip`, `Averaging`).

    ``__init__`` takes the options of ``parallel.strategy``. The engine calls

        setup                                                       once, before the optimizer is made
        begin_step
        for each stage: last_backward, its last backward, reduce    gradients: start what has not been started
        finish                                                      they are what the optimizer is to see
        step, and in it update                                      divide, clip, update
        after_step                                                  mix, average, gather
        report                                                      numbers for the metrics of the step
        state_dict, load_state_dict, parameter_state, load_parameter_state     checkpoints
        close

    and asks for the rest, to which an exact strategy that keeps its parameters on the ranks has nothing to add.

    Attributes:
        exact: whether replicas stay equal, and a step's numbers are those of the global batch.
        state_per_replica: whether what it keeps (`state_dict`, `parameter_state`) is of each replica, although it is
            exact; of an inexact one it always is.
        state_is_alike: whether that of any replica may stand for all, where their number changes.
        is_averaged: whether parameters are not the replica's own, inside of `evaluation` or `export`.
        tables: with sparse gradients, of this rank; None where there are none.
        trained: the stored parameters that training changes: of an inexact strategy each replica has its own.
        on_progress: called where this replica waits for others that go on: nothing is stuck.
        loss_scale: what the losses of the step that runs are multiplied by, set before `begin_step`; None: by nothing.
    """

    exact: ClassVar[bool] = True
    state_per_replica: bool = False
    state_is_alike: ClassVar[bool] = False
    is_averaged = False
    tables: Tables | None = None
    loss_scale: Tensor | None = None

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        """Once, before the optimizer is made."""
        self.store, self.parts = store, parts
        self.on_progress: Callable[[], None] = lambda: None
        self.trained = store.trainable()
        self._step_group = parts.context.group(self.summed_axes)
        self._data_group = parts.context.group("data")

    # -- a step -------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Before the first forward of step ``step`` (from 0)."""

    def last_backward(self, stage: int) -> None:
        """The backward that follows is a stage's last of the step: what it completes may be reduced at once."""

    def after_backward(self, stage: int, microbatch: int, kind: BackwardKind) -> None: ...

    def reduce(self, stage: int) -> None:
        """A stage's gradients are complete on this rank: start what has not been started, without waiting.

        Stages come in the same order on all ranks that share them. Parameters that several stages of a rank use come
        with the last of these.
        """

    def finish(self) -> None:
        """Wait until the gradients are what the optimizer is to see, not divided yet."""

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        scale: Tensor,
        before_update: Callable[[], None],
        found_inf: Tensor | None = None,
        clip_value: float | None = None,
    ) -> None:
        """Divide and clip the gradients, and update the parameters.

        Args:
            scale: what the gradients are to be multiplied by, float64 scalar: one over the count, and clipped.
            before_update: to be called once between the two.
            found_inf: whether a gradient is not finite, bool scalar: then nothing is to change, neither parameters nor
                the optimizer's state. None: all are finite.
            clip_value: largest absolute value of an element, after that; None does not clip.
        """
        scale_gradients(self.store.trainable(), scale, clip_value)
        before_update()
        if found_inf is None:
            self.update(optimizer)
        # a strategy's own update may keep what it is given, and so is told by not being called
        elif (
            type(self).update is Strategy.update
            and not self.tables
            and (context := skipping_on_device(optimizer, found_inf))
        ):
            with context:
                self.update(optimizer)
        elif not bool(found_inf):
            self.update(optimizer)
        self.after_update(optimizer, found_inf)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the parameters from gradients that are divided and clipped. Not called in a step that is skipped."""
        with self.tables.updated(optimizer) if self.tables else nullcontext():
            optimizer.step()

    def after_update(self, optimizer: torch.optim.Optimizer, found_inf: Tensor | None) -> None:
        """The update was made, or, where ``found_inf``, left out; see `step`."""

    def after_step(self, step: int) -> None:
        """After the update of step ``step``, also where that was skipped: mix, average, gather."""

    def abandon(self) -> None:
        """A step or an evaluation has failed: nothing but `close` follows, which is to wait for nobody."""

    def report(self) -> dict[str, float]:
        """Numbers for the metrics of a step, by name."""
        return {}

    # -- checkpoints ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State beyond the parameters: plain values and tensors, of which the first rank of each replica's are saved.
        Where replicas have state of their own (``exact`` is false, or ``state_per_replica``), each goes on with its
        own where there are as many; under another number it begins anew, with ``{}``, or with that of the first
        (``state_is_alike``), and under another strategy anew.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave, under another plan maybe; empty: begin anew."""

    def parameter_state(self) -> Mapping[nn.Parameter, Mapping[str, Any]]:
        """State for each parameter as it is stored: tensors of its shape, others that are the same on all ranks, or
        plain values. It is saved by logical name, so that it can be taken back under another plan.
        """
        return {}

    def load_parameter_state(self, state: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        """Take back what `parameter_state` gave; empty when the checkpoint has none."""

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> Mapping[Any, Any]:
        """What an optimizer keeps for each stored parameter, wherever that is. Collective over all ranks."""
        return optimizer.state

    def parameters_loaded(self) -> None:
        """Parameters, or the state of their optimizer, were loaded: what is kept of them elsewhere counts no more."""

    def close(self) -> None:
        """The run is over: let go of threads and connections."""

    # -- before a step --------------------------------------------------------------------------------------

    def prepare(self, model: nn.Module, context: ParallelContext) -> None:
        """The model of this rank, on the meta device, before its values are drawn: say what is stored how. Collective
        over all ranks.
        """

    def check_tables(self, found: Survey) -> None:
        """The tables of the whole model, before a pipeline cuts it; also called before a process is started.

        Raises:
            ValueError: for tables that this strategy cannot train.
        """
        for table in found.untied:
            raise ValueError(
                f"table {table.name!r} has sparse=True, but {type(self).__name__} takes dense gradients only, as does "
                f"compress: leave sparse out, or take parallel.strategy = 'hybrid' or 'all_reduce' without compress"
            )

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        """Once, before the first step."""

    def choices_made(self) -> list[str]:
        """Lines for the start of a run: what it has chosen."""
        return []

    # -- the numbers of a step ------------------------------------------------------------------------------

    @property
    def summed_axes(self) -> tuple[str, ...]:
        """Over which gradients and the step's numbers are summed: all, or those inside of a replica."""
        context = self.parts.context
        return context.grid.names if self.exact else context.replica_axes

    def squares_of_step(self, norm: GradientNorm, squares: Tensor) -> Tensor:
        """What this rank adds to the square of the gradient norm, for each entry of ``norm``: float64 [entries].

        Args:
            squares: of the gradients that are here, not finite where one of these is not.
        """
        return squares

    def replica_scalars(self, numbers: Tensor) -> Tensor:
        """The step's numbers summed over the replica's ranks, and by an exact strategy over all: float64, 1-D.

        By them the gradients are divided and clipped, so they are never late.
        """
        return collectives.all_reduce(numbers, self._step_group, owned=True).wait()

    def reduce_scalars(self, step: int, numbers: Tensor) -> Tensor:
        """What is logged of step ``step``: float64 [loss sum, count, gradient norm, ..], over all replicas where
        `is_summed` says so, else of the replica.
        """
        return numbers if self.exact else self.sum_over_replicas(numbers)

    def sum_over_replicas(self, numbers: Tensor) -> Tensor:
        """The numbers of a step, each replica's own, over all of them: sums, of the gradient norm the mean.
        Collective over data.
        """
        if self._data_group.size == 1:
            return numbers
        total = collectives.all_reduce(numbers.clone(), self._data_group, owned=True).wait()
        total[2] /= self._data_group.size
        return total

    def is_summed(self, step: int) -> bool:
        """Whether what is logged of step ``step`` is of all replicas."""
        return True

    def agree_on_stop(self, step: int, requests: float) -> float:
        """Called at the end of each step: the requests to stop that all replicas act on after step ``step``, at the
        same step.

        Args:
            requests: of the ranks that `replica_scalars` sums over, from their own request on in every step.
        """
        return requests

    def consensus(self) -> dict[str, float]:
        """How far replicas are apart, where that was found out since the last step (its end, an evaluation):
        ``consensus_distance``, ``consensus_distance_relative`` (`replica_average.Distance`).
        """
        return {}

    # -- where replicas differ ------------------------------------------------------------------------------

    @property
    def own_parameters(self) -> bool:
        """Whether each replica has parameters and an optimizer of its own, which a checkpoint keeps beside those that
        are evaluated.
        """
        return not self.exact

    def sync_point(self) -> None:
        """All replicas are about to do something together (evaluate, save, end): wait until all have come this far."""

    def evaluation(self) -> AbstractContextManager[None]:
        """Around an evaluation, and around a loop of `Engine.eval_step` or of one's own: inside, parameters and
        buffers are the average of the replicas. Collective over all ranks; one inside of another changes nothing.
        """
        return nullcontext()

    def forwards(self) -> AbstractContextManager[None]:
        """Around the forwards of one batch of an evaluation, inside of `evaluation`: as many as a rank has, or none.
        Collective.
        """
        return nullcontext()

    def export(self) -> AbstractContextManager[None]:
        """Around what gives weights away: inside, parameters and buffers are the same in all replicas. Collective over
        all ranks.
        """
        return nullcontext()

    def average_addend(self) -> tuple[list[Tensor], float]:
        """This replica's addend of the average, for each of the stored parameters in ``trained``, and its weight.

        The average is the sum of these over the sum of the weights, over all replicas; what is on its way is counted by
        who is to get it. The tensors may be the parameters themselves: they are not written to. Collective.
        """
        return [param.detach() for param in self.trained], 1.0
