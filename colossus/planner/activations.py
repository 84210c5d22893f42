"""What a microbatch keeps for backward on each stage, and the most that its forward and its backward need: counted by
running them on fake tensors under the plan's layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_map_only

from colossus.context.parallel_context import ParallelContext
from colossus.engine.inputs import Inputs, StepBatch, model_input
from colossus.engine.loss_function import LossFunction
from colossus.layers.model_parallel import model_parallel_of
from colossus.planner.block_runs import BlockRun
from colossus.planner.fake_tensors import CountedFakeTensors
from colossus.schedule.actions import INPUT_GRADIENT, LAST_USE, Action
from colossus.schedule.transport import ValueSpec, flatten_value, unflatten_value
from colossus.sharded_tensor.regions import without_sequence
from colossus.sharded_tensor.tensor import ShardedTensor


@dataclass(frozen=True)
class StageActivations:
    """Bytes of one microbatch on one stage, beyond what is there without it.

    Attributes:
        kept: from the end of its forward to its backward.
        forward: at most during its forward.
        backward: at most during its backward, with what was kept.
        passed: of what it is given and what it gives, the larger.
    """

    kept: int
    forward: int
    backward: int
    passed: int

    def and_more(self, kept: int) -> StageActivations:
        """Of a stage that keeps more, of blocks that were not run."""
        return StageActivations(self.kept + kept, self.forward + kept, self.backward + kept, self.passed)


def peak_of_step(actions: Sequence[Action], stages: Mapping[int, StageActivations]) -> int:
    """The most bytes of activations while a rank does its actions."""
    held = peak = 0
    for action in actions:
        if action.kind == "forward":
            peak = max(peak, held + stages[action.stage].forward)
            held += stages[action.stage].kept
        elif action.kind in INPUT_GRADIENT:
            peak = max(peak, held - stages[action.stage].kept + stages[action.stage].backward)
        if action.kind in LAST_USE:
            held -= stages[action.stage].kept
    return peak


@dataclass(frozen=True)
class _Counted:
    """A stage that has been run: what it needs as it was, what each further block of its runs keeps, what it gives."""

    activations: StageActivations
    slopes: Sequence[int]
    passed: ValueSpec


class MicrobatchRun:
    """Runs the first microbatch of a step through the stages of a model, forward and backward, one after the other.

    Args:
        batch: of this rank, of fake tensors.
        fake: the mode under which all is made, entered.

    Attributes:
        passed: stage -> what it gives to the next, of those that `stages` has run.
    """

    def __init__(
        self,
        loss_fn: LossFunction,
        batch: StepBatch,
        inputs: Inputs,
        context: ParallelContext,
        fake: CountedFakeTensors,
    ) -> None:
        self._loss_fn, self._batch, self._inputs, self._context, self._fake = loss_fn, batch, inputs, context, fake
        self._parallel = model_parallel_of(context)
        self._microbatch = batch.microbatches[0]
        self._own = inputs.local(self._microbatch)
        self.passed: dict[int, ValueSpec] = {}
        context.rng.move_to(0, 0)

    def stages(self, stages: Mapping[int, Sequence[BlockRun]]) -> dict[int, StageActivations]:
        """What each stage needs; of stages of equal blocks that are given equal tensors, one is run."""
        found: dict[int, StageActivations] = {}
        known: list[tuple[object, _Counted]] = []
        passed, last = None, max(stages)
        for stage in sorted(stages):
            runs = stages[stage]
            key = passed, [run.kind for run in runs], stage == last
            counted = next((each for other, each in known if other == key), None)
            if counted is None:
                counted = self._run(stage, runs, passed, stage == last)
                known.append((key, counted))
            more = sum(run.left_out * slope for run, slope in zip(runs, counted.slopes, strict=True))
            found[stage], passed = counted.activations.and_more(more), counted.passed
            if stage < last:
                self.passed[stage] = passed
        return found

    def _run(self, stage: int, runs: Sequence[BlockRun], given: ValueSpec | None, is_last: bool) -> _Counted:
        fake = self._fake
        before = fake.mark()
        slopes = []
        with self._parallel.batch(self._batch.info), self._context.precision.autocast(self._context.device):
            value, roots = self._value(given)
            for run in runs:
                live = [fake.live]
                for call in run.shown:
                    value = call(value)
                    live.append(fake.live)
                slopes.append(live[-1] - live[-2])
            if is_last:
                value = self._loss_fn(tree_map_only(ShardedTensor, without_sequence, value), self._own)[0]
        passed, edges = self._edges(value, stage)
        del value  # what is sent is no part of what is kept, unless it is saved for backward, too
        forward, kept = fake.peak - before, fake.live - before
        fake.mark()
        if edges:
            with self._parallel.batch(self._batch.info):
                torch.autograd.backward(edges, [torch.empty(x.shape, dtype=x.dtype) for x in passed.differentiable])
        del edges, roots
        most = max(_bytes_of(given), 0 if is_last else _bytes_of(passed))
        return _Counted(StageActivations(kept, forward, fake.peak - before, most), slopes, passed)

    def _value(self, given: ValueSpec | None) -> tuple[Any, list[Tensor]]:
        """What a stage is called with, as it arrives; the first takes the batch."""
        if given is None:
            return self._inputs.mark_tokens(model_input(self._own), self._microbatch), []
        return unflatten_value(given, [torch.empty(x.shape, dtype=x.dtype) for x in given.tensors], self._parallel)

    def _edges(self, value: Any, stage: int) -> tuple[ValueSpec, list[GradientEdge]]:
        """What a stage gives, and where its backward begins."""
        passed, tensors = flatten_value(value, self._parallel, f"stage {stage}")
        made = zip(tensors, passed.tensors, strict=True)
        return passed, [get_gradient_edge(x) for x, spec in made if spec.needs_gradient]


def _bytes_of(passed: ValueSpec | None) -> int:
    return 0 if passed is None else sum(x.shape.numel() * x.dtype.itemsize for x in passed.tensors)
