"""The base of data-parallel strategies, which decide what replicas exchange along the data axis, and when."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Literal

import torch
from torch import Tensor, nn

from colossus.context.parallel_context import ParallelContext
from colossus.data_parallel.replica_state import ReplicaState
from colossus.data_parallel.step_numbers import StepNumbers
from colossus.data_parallel.update import scale_gradients, skipping_on_device
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.gradients.reduction import ModelParts
from colossus.sparse.choice import Survey
from colossus.sparse.tables import Tables

#: a backward of inputs and weights (dgrad and wgrad), or one of its halves under a schedule that splits them
BackwardKind = Literal["backward", "backward_input", "backward_weight"]


class Strategy(StepNumbers, ReplicaState):
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

    Its methods are of three ideas: how gradients are summed and applied (here), what the ranks agree on in a step
    (`StepNumbers`), and what a replica has of its own (`ReplicaState`).

    Attributes:
        tables: this rank's tables with sparse gradients; None where there are none.
        on_progress: called where this replica waits for others that go on, so that nothing counts as stuck.
        loss_scale: the factor of the losses of the step that runs, set before `begin_step`; None: 1.
    """

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
