"""The base of data-parallel strategies, which decide what replicas exchange along the data axis, and when."""

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
    """The base of the data-parallel strategies, which exchanges nothing.

    A *replica* is a whole copy of the model, on the ranks over all axes but ``data``. An *exact* strategy keeps
    replicas equal, and a step's numbers are those of the global batch; it is a subclass of `AllReduce`, or of this
    class. Under an inexact strategy each replica has parameters of its own. It sums gradients inside a replica, and
    divides and clips them by the replica's own count and norm; it is a subclass of `PerReplica` (`Gossip`,
    `Averaging`).

    ``__init__`` takes the options of ``parallel.strategy``. The engine calls

        setup                                                       once, before the optimizer is made
        begin_step
        for each stage: last_backward, its last backward, reduce    start sums of gradients
        finish                                                      wait for the sums
        step, and in it update                                      divide, clip, update
        after_step                                                  mix, average, gather
        report                                                      numbers for the metrics of the step
        state_dict, load_state_dict, parameter_state, load_parameter_state     checkpoints
        close

    An exact strategy that keeps its parameters on the ranks need not override the other methods.

    Attributes:
        exact: whether replicas stay equal, and a step's numbers are those of the global batch.
        state_per_replica: whether each replica of an exact strategy has state of its own (`state_dict`,
            `parameter_state`), as each replica of an inexact one has.
        state_is_alike: whether the state of one replica may be loaded by all, where their number changes.
        is_averaged: whether parameters are the average of the replicas now, inside `evaluation` or `export`.
        tables: this rank's tables with sparse gradients; None where there are none.
        trained: the stored parameters that training changes.
        on_progress: called where this replica waits for others that go on, so that nothing counts as stuck.
        loss_scale: the factor of the losses of the step that runs, set before `begin_step`; None: 1.
    """

    exact: ClassVar[bool] = True
    state_per_replica: bool = False
    state_is_alike: ClassVar[bool] = False
    is_averaged = False
    tables: Tables | None = None
    loss_scale: Tensor | None = None

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        """Set the strategy up for a model; called once, before the optimizer is made."""
        self.store, self.parts = store, parts
        self.on_progress: Callable[[], None] = lambda: None
        self.trained = store.trainable()
        self._step_group = parts.context.group(self.summed_axes)
        self._data_group = parts.context.group("data")

    # -- a step -------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Begin step ``step`` (from 0); called before its first forward."""

    def last_backward(self, stage: int) -> None:
        """Prepare for a stage's last backward of the step, which follows: gradients may be reduced as it makes them."""

    def after_backward(self, stage: int, microbatch: int, kind: BackwardKind) -> None: ...

    def reduce(self, stage: int) -> None:
        """Start the remaining reductions of a stage, whose gradients are complete on this rank, without waiting.

        Stages come in the same order on all ranks that share them. Parameters that several stages of a rank use come
        with the last of these.
        """

    def finish(self) -> None:
        """Wait until the gradients that the optimizer will see are complete; they are not divided yet."""

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
            optimizer: the optimizer.
            scale: the factor of the gradients, a float64 scalar: one over the count, times that of clipping by norm.
            before_update: called once when gradients are divided and clipped.
            found_inf: a bool scalar, whether a gradient is not finite; then neither parameters nor the optimizer's
                state may change. None: all are finite.
            clip_value: the largest absolute value of an element after the division; None does not clip.
        """
        scale_gradients(self.store.trainable(), scale, clip_value)
        before_update()
        if found_inf is None:
            self.update(optimizer)
        # a strategy's own update may keep state, so in a skipped step it must not be called at all
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
        """Update the parameters by gradients that are divided and clipped; not called in a skipped step."""
        with self.tables.updated(optimizer) if self.tables else nullcontext():
            optimizer.step()

    def after_update(self, optimizer: torch.optim.Optimizer, found_inf: Tensor | None) -> None:
        """Take note that the update was made, or skipped where ``found_inf`` (see `step`)."""

    def after_step(self, step: int) -> None:
        """Mix, average or gather after the update of step ``step``, also where it was skipped."""

    def abandon(self) -> None:
        """Take note that a step or an evaluation has failed; only `close` follows, which must wait for no rank."""

    def report(self) -> dict[str, float]:
        """Return numbers for the metrics of a step, by name."""
        return {}

    # -- checkpoints ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return state beyond the parameters: plain values and tensors, saved from the first rank of each replica.

        Where replicas have state of their own (not ``exact``, or ``state_per_replica``), each loads its own as long as
        their number is the same. Under another number each loads ``{}``, or the first one's state where
        ``state_is_alike``. Under another strategy each loads ``{}``.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, possibly under another plan; an empty state resets."""

    def parameter_state(self) -> Mapping[nn.Parameter, Mapping[str, Any]]:
        """Return state of each stored parameter: tensors of its shape, tensors that all ranks share, or plain values.

        It is saved by logical name, so that it can be loaded under another plan.
        """
        return {}

    def load_parameter_state(self, state: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        """Load what `parameter_state` returned; empty when the checkpoint has none."""

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> Mapping[Any, Any]:
        """Return the optimizer's state of each stored parameter, wherever it is. Collective over all ranks."""
        return optimizer.state

    def parameters_loaded(self) -> None:
        """Drop copies of parameters and of their optimizer's state, which were loaded from a checkpoint."""

    def close(self) -> None:
        """End threads and connections; the run is over."""

    # -- before a step --------------------------------------------------------------------------------------

    def prepare(self, model: nn.Module, context: ParallelContext) -> None:
        """Decide how the parameters of this rank's model are stored. Collective over all ranks.

        Args:
            model: this rank's part of the model, on the meta device, before its values are drawn.
            context: the ranks.
        """

    def check_tables(self, survey: Survey) -> None:
        """Raise ValueError for tables that this strategy cannot train; also called before a process is started.

        Args:
            survey: the tables of the whole model, before a pipeline cuts it.
        """
        for table in survey.untied:
            raise ValueError(
                f"table {table.name!r} has sparse=True, but {type(self).__name__} takes dense gradients only, as does "
                f"compress: leave sparse out, or take parallel.strategy = 'hybrid' or 'all_reduce' without compress"
            )

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note of the optimizer; called once, before the first step."""

    def choices_made(self) -> list[str]:
        """Return lines for the start of a run that say what the strategy has chosen."""
        return []

    # -- the numbers of a step ------------------------------------------------------------------------------

    @property
    def summed_axes(self) -> tuple[str, ...]:
        """The axes over which gradients and the step's numbers are summed: all, or those inside a replica."""
        context = self.parts.context
        return context.grid.names if self.exact else context.replica_axes

    def squares_of_step(self, norm: GradientNorm, squares: Tensor) -> Tensor:
        """Return this rank's addends of the squared gradient norm, for each parameter of ``norm``: float64 [params].

        Args:
            norm: the gradient norm.
            squares: the squares of the gradients on this rank, not finite where a gradient is not.
        """
        return squares

    def replica_scalars(self, numbers: Tensor) -> Tensor:
        """Sum the step's numbers, float64 [n], over the replica's ranks, or over all under an exact strategy.

        Gradients are divided and clipped by the sums, so this waits for them.
        """
        return collectives.all_reduce(numbers, self._step_group, owned=True).wait()

    def reduce_scalars(self, step: int, numbers: Tensor) -> Tensor:
        """Return the logged numbers of step ``step``, float64 [loss sum, count, gradient norm, ..].

        They are those of all replicas where `is_summed` is true, else those of this replica.
        """
        return numbers if self.exact else self.sum_over_replicas(numbers)

    def sum_over_replicas(self, numbers: Tensor) -> Tensor:
        """Sum the replicas' numbers of a step; of the gradient norm, return the mean. Collective over data."""
        if self._data_group.size == 1:
            return numbers
        total = collectives.all_reduce(numbers.clone(), self._data_group, owned=True).wait()
        total[2] /= self._data_group.size
        return total

    def is_summed(self, step: int) -> bool:
        """Return whether the logged numbers of step ``step`` are those of all replicas."""
        return True

    def agree_on_stop(self, step: int, requests: float) -> float:
        """Return the requests to stop that all replicas act on after step ``step``; called at the end of each step.

        Args:
            step: the step, the same on all replicas where the result is not 0.
            requests: the requests of the ranks that `replica_scalars` sums over, in every step from the first on.
        """
        return requests

    def consensus(self) -> dict[str, float]:
        """Return the distance of the replicas from their average, where the last step or an evaluation measured it.

        The keys are ``consensus_distance`` and ``consensus_distance_relative`` (`replica_average.Distance`).
        """
        return {}

    # -- where replicas differ ------------------------------------------------------------------------------

    @property
    def own_parameters(self) -> bool:
        """Return whether each replica has parameters and an optimizer of its own.

        A checkpoint saves these beside the parameters that are evaluated.
        """
        return not self.exact

    def sync_point(self) -> None:
        """Wait until all replicas have come here, before they evaluate, save or end together."""

    def evaluation(self) -> AbstractContextManager[None]:
        """Return a context in which parameters and buffers are the average of the replicas. Collective over all ranks.

        It is entered around an evaluation, and around a loop of `Engine.eval_step` or of one's own. Nested contexts
        change nothing.
        """
        return nullcontext()

    def forwards(self) -> AbstractContextManager[None]:
        """Return a context for a batch's forwards inside `evaluation`; a rank may have any number. Collective."""
        return nullcontext()

    def export(self) -> AbstractContextManager[None]:
        """Return a context for exports, in which parameters and buffers are the same in all replicas.

        Collective over all ranks.
        """
        return nullcontext()

    def average_addend(self) -> tuple[list[Tensor], float]:
        """Return this replica's addend of the average, for each stored parameter in ``trained``, and its weight.

        The average is the sum of the addends of all replicas over the sum of their weights. The receiver counts values
        that are under way. The tensors may be the parameters themselves, so they are not written to. Collective.
        """
        return [param.detach() for param in self.trained], 1.0
