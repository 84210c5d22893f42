"""The data axis of a run: what replicas exchange, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from colossus.data_parallel.engine_queries import EngineQueries
from colossus.data_parallel.skipped_update import skipping_on_device
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.gradients.gradient_norm import values_of
from colossus.gradients.reduction import ModelParts


class Strategy(EngineQueries):
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

    and asks what `EngineQueries` answers.

    Attributes:
        on_progress: called where this replica waits for others that go on: nothing is stuck.
        loss_scale: what the losses of the step that runs are multiplied by, set before `begin_step`; None: by nothing.
    """

    loss_scale: Tensor | None = None

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        """Once, before the optimizer is made."""
        self.store, self.parts = store, parts
        self.on_progress: Callable[[], None] = lambda: None
        self.trained = store.trainable()
        context = parts.context
        self._step_group = context.group(self.summed_axes)
        self._data_group = context.group("data")

    # -- a step -------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Before the first forward of step ``step`` (from 0)."""

    def last_backward(self, stage: int) -> None:
        """The backward that follows is a stage's last of the step: what it completes may be reduced at once."""

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

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the parameters from gradients that are divided and clipped. Not called in a step that is skipped."""
        with self.tables.updated(optimizer) if self.tables else nullcontext():
            optimizer.step()

    def after_step(self, step: int) -> None:
        """After the update of step ``step``: mix, average, gather.

        Also after a step that was skipped, whose parameters are those from before it: other replicas may wait here.
        """

    def abandon(self) -> None:
        """A step or an evaluation has failed: nothing but `close` follows, which is to wait for nobody."""

    def report(self) -> dict[str, float]:
        """Numbers for the metrics of a step, by name."""
        return {}

    # -- checkpoints ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State beyond the parameters: plain values and tensors, of which the first rank of each replica's are saved.
        Where replicas have state of their own (``exact`` is false, or ``state_per_replica``), each goes on with its
        own where there are as many; under another number, or another strategy, it begins anew, with ``{}``."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave, under another plan maybe; empty: begin anew."""
        if state:
            raise ValueError(f"{type(self).__name__} has no state, but was given {', '.join(sorted(state))}")

    def parameter_state(self) -> Mapping[nn.Parameter, Mapping[str, Any]]:
        """State for each parameter as it is stored: tensors of its shape, others that are the same on all ranks, or
        plain values. It is saved by logical name, so that it can be taken back under another plan."""
        return {}

    def load_parameter_state(self, state: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        """Take back what `parameter_state` gave; empty when the checkpoint has none."""

    def close(self) -> None:
        """The run is over: let go of threads and connections."""


def scale_gradients(params: Iterable[nn.Parameter], scale: Tensor, clip_value: float | None = None) -> None:
    """Multiply all gradients in place; then clip their elements to at most ``clip_value``, if that is given."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for param in params:
        if param.grad is not None:
            grad = values_of(param.grad)
            kinds.setdefault((grad.dtype, grad.device), []).append(grad)
    for (dtype, device), grads in kinds.items():
        torch._foreach_mul_(grads, scale.to(device, dtype))
        if clip_value is not None:
            clip_elements(dtype, grads, clip_value)


def clip_elements(dtype: torch.dtype, grads: list[Tensor], largest: float) -> None:
    """Clip elements in place to at most ``largest`` in absolute value; of complex ones the real and imaginary parts."""
    if dtype.is_complex:
        grads = [torch.view_as_real(grad) for grad in grads]
    torch._foreach_clamp_max_(grads, largest)
    torch._foreach_clamp_min_(grads, -largest)
