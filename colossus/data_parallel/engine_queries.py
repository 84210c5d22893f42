"""What the engine asks of a strategy besides the points of a step.

An exact strategy that keeps its parameters on the ranks has nothing to add to the answers here. `PerReplica` gives
those of strategies whose replicas differ, `AllReduce` those about tables, the strategies of servers those about
parameters that are elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext
from colossus.gradients.buckets import LocalSum
from colossus.gradients.gradient_norm import GradientNorm
from colossus.gradients.reduction import ModelParts
from colossus.sparse.choice import Survey
from colossus.sparse.tables import Tables

#: a backward of inputs and weights (dgrad and wgrad), or one of its halves under a schedule that splits them
BackwardKind = Literal["backward", "backward_input", "backward_weight"]


class EngineQueries:
    """
    Attributes:
        exact: whether replicas stay equal, and a step's numbers are those of the global batch.
        state_per_replica: whether what it keeps (`Strategy.state_dict`, `parameter_state`) is of each replica, although
            it is exact; of an inexact one it always is.
        evaluates: of an inexact one, what is evaluated and exported: the average of the replicas, or each replica's own
            (exported: the first's).
        is_averaged: whether parameters are not the replica's own, inside of `evaluation` or `export`.
        tables: with sparse gradients, of this rank; None where there are none.
        trained: the stored parameters that training changes: of an inexact strategy each replica has its own.
    """

    exact: ClassVar[bool] = True
    state_per_replica: bool = False
    evaluates: Literal["average", "own"] = "own"
    is_averaged = False
    tables: Tables | None = None
    parts: ModelParts
    trained: list[nn.Parameter]
    _step_group: AxisGroup
    _data_group: AxisGroup

    # -- before a step --------------------------------------------------------------------------------------

    def prepare(self, model: nn.Module, context: ParallelContext) -> None:
        """The model of this rank, on the meta device, before its values are drawn: say what is stored how. Collective
        over all ranks."""

    def check_tables(self, found: Survey) -> None:
        """The tables of the whole model, before a pipeline cuts it; also called before a process is started.

        Raises:
            ValueError: for tables that this strategy cannot train.
        """
        for table in found.untied:
            raise ValueError(
                f"table {table.name!r} has sparse=True, but {self.dense_because()}: leave sparse out, or take "
                f"parallel.strategy = 'hybrid' or 'all_reduce'"
            )

    def dense_because(self) -> str:
        """Why this strategy takes no tables, in words."""
        return f"{type(self).__name__} knows dense gradients only"

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        """Once, before the first step."""

    def choices_made(self) -> list[str]:
        """Lines for the start of a run: what it has chosen."""
        return []

    def choices_in_short(self) -> str:
        """The same in a few words, for the end of a run; empty where it had nothing to choose."""
        return ""

    # -- the numbers of a step ------------------------------------------------------------------------------

    @property
    def summed_axes(self) -> tuple[str, ...]:
        """Over which gradients and the step's numbers are summed: all, or those inside of a replica."""
        context = self.parts.context
        return context.grid.names if self.exact else context.replica_axes

    def after_backward(self, stage: int, microbatch: int, kind: BackwardKind) -> None: ...

    def local_sums(self) -> list[LocalSum]:
        """Of each piece of gradients that this rank gave to a collective in this step: which parameters' they are, and
        the sum of its own numbers before the first collective that took them.

        Read where a gradient turns out not to be finite, to tell on which rank that began. Scalars on the device, a
        parameter in one piece; what no collective sums is in none.
        """
        return []

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

    def replica_count(self, numbers: Tensor) -> Tensor | None:
        """Of the numbers that `replica_scalars` gave, the count of this replica alone; None where nobody knows it."""
        return None if self.exact else numbers[1]

    def reduce_scalars(self, step: int, numbers: Tensor) -> Tensor:
        """What is logged of step ``step``, over all replicas: float64 [loss sum, count, gradient norm, ..].

        Of an inexact strategy the norm is averaged over replicas and all else is summed, where `is_summed` says so;
        else they are those of its own replica.
        """
        if self.exact:
            return numbers
        return self.sum_over_replicas(numbers)

    def sum_over_replicas(self, numbers: Tensor) -> Tensor:
        """The numbers of a step, each replica's own, over all of them: sums, of the gradient norm the mean.
        Collective over data."""
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
        """How far replicas are apart, where that was found out since the last step (its end, an evaluation): the
        ``consensus_distance`` is the root of the mean over replicas of ||z_i - average||^2, over ||average|| it is the
        ``consensus_distance_relative``."""
        return {}

    # -- parameters of replicas, or elsewhere ---------------------------------------------------------------

    @property
    def own_parameters(self) -> bool:
        """Whether each replica has parameters and an optimizer of its own, which a checkpoint keeps beside those that
        are evaluated."""
        return not self.exact

    def sync_point(self) -> None:
        """All replicas are about to do something together (evaluate, save, end): wait until all have come this far.

        Replicas that wait answer those that do not.
        """

    def evaluation(self) -> AbstractContextManager[None]:
        """Around an evaluation, and around a loop of `Engine.eval_step` or of one's own: inside, parameters and
        buffers are those that ``evaluates`` says. Collective, by ranks of all replicas; one inside of another changes
        nothing."""
        return nullcontext()

    def forwards(self) -> AbstractContextManager[None]:
        """Around the forwards of one batch of an evaluation, inside of `evaluation`: as many as a rank has, or none.
        Collective."""
        return nullcontext()

    def export(self) -> AbstractContextManager[None]:
        """Around what gives weights away: inside, parameters and buffers are the same in all replicas. Collective, by
        ranks of all replicas."""
        return nullcontext()

    def average_addend(self) -> tuple[list[Tensor], float]:
        """This replica's addend of the average, for each of the stored parameters in ``trained``, and its weight.

        The average is the sum of these over the sum of the weights, over all replicas; what is on its way is counted by
        who is to get it. The tensors may be the parameters themselves: they are not written to. Called on all ranks of
        all replicas, since it may be collective.
        """
        return [param.detach() for param in self.trained], 1.0

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> Mapping[Any, Any]:
        """What an optimizer keeps for each stored parameter, wherever that is. Collective over all ranks."""
        return optimizer.state

    def parameters_loaded(self) -> None:
        """Parameters, or the state of their optimizer, were loaded: what is kept of them elsewhere counts no more."""
