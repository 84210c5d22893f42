"""The base of strategies, seen from a replica's state: what it has of its own, and how that is saved and averaged."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class ReplicaState:
    """The state of a replica beyond its parameters, and the average of replicas that differ.

    Attributes:
        exact: whether replicas stay equal.
        state_per_replica: whether each replica of an exact strategy has state of its own (`state_dict`,
            `parameter_state`), as each replica of an inexact one has.
        state_is_alike: whether the state of one replica may be loaded by all, where their number changes.
        is_averaged: whether parameters are the average of the replicas now, inside `evaluation` or `export`.
        trained: the stored parameters that training changes.
    """

    exact: ClassVar[bool] = True
    state_per_replica: bool = False
    state_is_alike: ClassVar[bool] = False
    is_averaged = False
    trained: list[nn.Parameter]

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

    # -- where replicas differ ------------------------------------------------------------------------------

    @property
    def own_parameters(self) -> bool:
        """Return whether each replica has parameters and an optimizer of its own.

        A checkpoint saves these beside the parameters that are evaluated.
        """
        return not self.exact

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
        """Return a context for exports, that of an evaluation. Collective over all ranks."""
        return self.evaluation()

    def average_addend(self) -> tuple[list[Tensor], float]:
        """Return this replica's addend of the average, for each stored parameter in ``trained``, and its weight.

        The average is the sum of the addends of all replicas over the sum of their weights. The receiver counts values
        that are under way. The tensors may be the parameters themselves, so they are not written to. Collective.
        """
        return [param.detach() for param in self.trained], 1.0
