"""The stages of a model on this rank as the executor calls them: model, loss, and what surrounds their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from torch import nn

from colossus.context.parallel_context import ParallelContext
from colossus.engine.inputs import Inputs, model_input
from colossus.engine.loss_function import LossFunction, checked_loss
from colossus.engine.strategies.all_reduce import AllReduce
from colossus.layers.deferred_wgrad import DeferredWgrad
from colossus.schedule.actions import Action
from colossus.schedule.runtime.executor import Work
from colossus.schedule.runtime.stage_scope import NAME_IT, MetaTensorGuard, StageRng
from colossus.tensor_parallel.weight_store import WeightStore


class Observer(Protocol):
    """Watches every forward of a stage on this rank; with a pipeline, backwards run between them."""

    def begin(self, stage: int, microbatch: int) -> None:
        """A stage is about to run; it has ended before another one begins."""

    def end(self, stage: int, microbatch: int, output: Any, part: Any) -> None:
        """It has run; of the last stage, the loss has not.

        Args:
            output: what the stage returned.
            part: what this rank's model takes of the microbatch, the same for all stages: what a loss function gets.
        """


class ModelStages:
    """What `colossus.schedule.runtime.executor.Stages` asks for.

    Args:
        calls: stage -> what runs it, for the stages of this rank.
        last: number of the last stage of the model.
        inputs: from a microbatch of a data rank to what the model of this rank takes of it.
        loss_fn: (outputs of the last stage, what the model takes of the microbatch) -> (sum, count).
        parts: the parameters that are reduced with each stage.
        draws: under a pipeline, what torch's own generator draws from inside of stages.

    Attributes:
        step: of the random streams; None evaluates.
        observers: told of forwards; without one, stages in the middle do not look at the batch.
    """

    def __init__(
        self,
        context: ParallelContext,
        calls: Mapping[int, Callable[[Any], Any]],
        last: int,
        *,
        inputs: Inputs,
        loss_fn: LossFunction,
        weights: WeightStore,
        strategy: AllReduce,
        parts: Mapping[int, Sequence[nn.Parameter]],
        splits_backward: bool,
        draws: StageRng | None,
    ) -> None:
        self._context, self._calls, self._last = context, calls, last
        self._inputs, self._loss_fn = inputs, loss_fn
        self._weights, self._strategy = weights, strategy
        self._parts, self._draws = parts, draws
        self._unseen = set(calls) if draws is not None else set()
        self._part_of = {stage: number for number, stage in enumerate(parts)}
        self._ids = {stage: {id(param) for param in part} for stage, part in parts.items()}
        self._late: AbstractContextManager[Any] = DeferredWgrad(weights) if splits_backward else nullcontext()
        self.step: int | None = None
        self.observers: list[Observer] = []

    def forward(self, stage: int, microbatch: int, value: Any, batch: Any) -> Any:
        if self.step is not None:
            self._context.rng.move_to(self.step, microbatch)
        with self._context, self._late:
            own = self._inputs.local(batch) if stage in (0, self._last) or self.observers else None
            if stage == 0:
                value = model_input(own)
            for observer in self.observers:
                observer.begin(stage, microbatch)
            with self._draws or nullcontext(), MetaTensorGuard(stage) if stage in self._unseen else nullcontext():
                try:
                    out = self._calls[stage](value)
                    for observer in self.observers:
                        observer.end(stage, microbatch, out, own)
                    if stage == self._last:
                        out = checked_loss(self._loss_fn(out, own))
                except AttributeError as error:
                    if self._draws is not None:
                        error.add_note(f"If it is an attribute of a module: it may be on another stage. {NAME_IT}")
                    raise
            self._unseen.discard(stage)
            return out

    def is_trained(self, stage: int) -> bool:
        return any(param.requires_grad for param in self._parts[stage])

    def before_backward(self, microbatch: int) -> None:
        self._context.rng.return_to(microbatch)

    def whole(self) -> AbstractContextManager[None]:
        return self._late

    def run_wgrad(self, work: Work) -> None:
        self._weights.run_wgrad(work)

    @contextmanager
    def deferring(self) -> Iterator[Work]:
        with self._late, self._weights.deferred_wgrad() as work:
            yield work

    def before_last(self, stage: int) -> None:
        self._weights.set_last_microbatch()
        self._strategy.arm(self._part_of[stage])

    def after_last(self, stage: int) -> None:
        self._weights.set_last_microbatch(False)

    def reduce(self, stage: int) -> None:
        self._weights.flush(self._ids[stage])
        self._strategy.start(self._part_of[stage])


def parameters_by_stage(
    actions: Sequence[Action], parameters_on: Callable[[int], Sequence[nn.Parameter]]
) -> dict[int, list[nn.Parameter]]:
    """Stage -> the parameters whose gradients are complete with it, in the order of a rank's reductions.

    What several stages of the rank share comes with the last of them.
    """
    order = [action.stage for action in actions if action.kind == "reduce"]
    taken: set[int] = set()
    parts: dict[int, list[nn.Parameter]] = {}
    for stage in reversed(order):
        parts[stage] = [param for param in parameters_on(stage) if id(param) not in taken]
        taken |= {id(param) for param in parts[stage]}
    return {stage: parts[stage] for stage in order}
