"""The pipeline of a run on one rank: its actions, its stages of the model, and their executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from colossus.comm.links import Links
from colossus.config import Config
from colossus.context.parallel_context import ParallelContext
from colossus.layers.model_parallel import ModelParallel
from colossus.layers.pipeline_block import NamedBlock, is_chain, joined_blocks, pipeline_blocks, run_blocks
from colossus.schedule.actions import Action, placement
from colossus.schedule.build import make_schedule
from colossus.schedule.executor import Executor, Stages, StepObserver, forward_only
from colossus.schedule.partition import Partition, keep_stages_of, make_partition
from colossus.schedule.transport import Transport


class PipelineRuntime:
    """The pipeline of a run on one rank. A run without a pipeline has a schedule of one stage on one rank.

    Attributes:
        num_microbatches: the number of microbatches of a whole batch.
        rank_of: stage -> index along the pipeline axis.
        rank: this rank's index along the pipeline axis.
        partition: the partition of the model, which `split` makes; None when there is one stage.
    """

    def __init__(self, config: Config, context: ParallelContext) -> None:
        self._context, self._schedule, self._split = context, config.schedule, config.parallel.pipeline.split
        self.rank = context.index("pipeline")
        self.rank_of: Mapping[int, int]
        self._sizes, self._has_budget = config.train.batch_sizes, config.train.tokens_per_microbatch is not None
        self.set_microbatches(config.schedule.microbatches)
        self.partition: Partition | None = None
        self._links: Links | None = None

    def set_microbatches(self, number: int) -> None:
        """Cut the whole batch of a step into ``number`` microbatches, from the next step on. All ranks must call.

        Raises:
            ValueError: the schedule is wrong (see `make_schedule`), or it places or reduces the stages in another way
                for the fewer microbatches of a batch that still grows.
        """
        self.num_microbatches = number
        #: number of microbatches -> the actions of this rank
        self._actions: dict[int, Sequence[Action]] = {}
        for count in sorted({self._microbatches_of(samples) for samples in self._sizes.all}, reverse=True):
            self._make_actions(count)

    def _make_actions(self, count: int) -> None:
        schedule = self._schedule
        actions = make_schedule(schedule.type, self._context.size("pipeline"), count, **schedule.options)
        own, rank_of = actions[self.rank], placement(actions)
        if self._actions and (rank_of != self.rank_of or _reduced(own) != _reduced(self.actions)):
            raise ValueError(
                f"schedule {schedule.type!r} places the stages, or completes their gradients, in another order with "
                f"{count} microbatches than with {self.num_microbatches}: train.batch_ramp and "
                f"train.tokens_per_microbatch need a schedule that does not"
            )
        self.rank_of, self._actions[count] = rank_of, own

    @property
    def most_microbatches(self) -> int:
        """The most microbatches of a step as far as they are known: with a budget of tokens, at least two."""
        return max(self.num_microbatches, 2 if self._has_budget else 1)

    @property
    def actions(self) -> Sequence[Action]:
        """The actions of this rank in a step with a whole batch."""
        return self._actions[self.num_microbatches]

    def actions_of(self, microbatches: int) -> Sequence[Action]:
        """Return the actions of this rank in a step of ``microbatches`` microbatches."""
        if microbatches not in self._actions:  # of a budget of tokens
            self._make_actions(microbatches)
        return self._actions[microbatches]

    def microbatches_at(self, step: int) -> int:
        """Return the number of microbatches of a step (from 0): fewer of the same size while the batch grows."""
        return self._microbatches_of(self._sizes.at(step))

    def _microbatches_of(self, samples: int) -> int:
        return -(-self.num_microbatches * samples // self._sizes.full)

    @property
    def last_stage(self) -> int:
        """The number of the last stage of the model."""
        return max(self.rank_of)

    @property
    def splits_backward(self) -> bool:
        """Return whether backwards are split into those of inputs and those of weights."""
        return any(action.kind == "backward_weight" for action in self.actions)

    def split(self, model: nn.Module) -> None:
        """Delete the stages of other ranks from a model on the meta device.

        Raises:
            ValueError: see `make_partition`.
        """
        if self.last_stage:
            self.partition = make_partition(model, self.rank_of, self._split)
            keep_stages_of(model, self.partition, self.rank)

    def stage_forwards(self, model: nn.Module) -> dict[int, Callable[[Any], Any]]:
        """Return for each stage of this rank the function that runs it."""
        if self.partition is None:
            return {0: model}
        stages = self.partition.stages_on(self.rank)
        calls = {stage: joined_blocks([block.call for block in self.partition.blocks_of(stage)]) for stage in stages}
        return {stage: of[0] if len(of) == 1 else partial(run_blocks, of) for stage, of in calls.items()}

    def parameters_on(self, stage: int, model: nn.Module) -> list[nn.Parameter]:
        """Return the parameters that a stage of this rank uses."""
        if self.partition is None:
            return list(model.parameters())
        parameters = dict(model.named_parameters())
        return [parameters[name] for name in self.partition.parameters_on(stage)]

    def parameters_by_stage(self, model: nn.Module) -> dict[int, list[nn.Parameter]]:
        """Return for each stage of this rank, in the order of reductions, the parameters whose gradients it completes.

        Parameters that several stages of the rank share belong to the last of these.
        """
        order = _reduced(self.actions)
        by_stage: dict[int, list[nn.Parameter]] = {}
        seen: set[int] = set()
        for stage in reversed(order):
            by_stage[stage] = [param for param in self.parameters_on(stage, model) if id(param) not in seen]
            seen |= {id(param) for param in by_stage[stage]}
        return {stage: by_stage[stage] for stage in order}

    def chain(self, model: nn.Module) -> list[NamedBlock] | None:
        """Return the blocks of this rank, or None where the model is no chain of blocks."""
        if self.partition is not None:
            return [block for stage in self.partition.stages_on(self.rank) for block in self.partition.blocks_of(stage)]
        return pipeline_blocks(model) if is_chain(model) else None

    def tied_parameters(self, model: nn.Module) -> list[tuple[nn.Parameter, tuple[int, ...]]]:
        """Return the parameters of this rank that other pipeline ranks hold, too, each with all of their ranks."""
        if self.partition is None:
            return []
        parameters = dict(model.named_parameters())
        ranks_of = {name: self.partition.ranks_of(name) for name in self.partition.sizes if name in parameters}
        return [(parameters[name], ranks) for name, ranks in ranks_of.items() if len(ranks) > 1]

    def make_executor(
        self, stages: Stages, parallel: ModelParallel, observers: Sequence[StepObserver] = ()
    ) -> Executor:
        """Make the executor of this rank's actions. All ranks of the pipeline must call."""
        transport = None
        if self._context.size("pipeline") > 1:
            group = self._context.group("pipeline")
            pairs = [
                (self.rank_of[stage], self.rank_of[stage + step])
                for step in (1, -1)
                for stage in self.rank_of
                if stage + step in self.rank_of and self.rank_of[stage] != self.rank_of[stage + step]
            ]
            self._links = Links(group, pairs, self._context.device)
            transport = Transport(self._links, self.rank_of)
        return Executor(stages, self.rank_of, transport, parallel, observers)

    def forward_actions(self, microbatches: int) -> list[Action]:
        """Return the actions of this rank in an evaluation."""
        return forward_only(self.actions_of(max(microbatches, self.num_microbatches)), microbatches)

    def close(self) -> None:
        if self._links is not None:
            self._links.close()


def _reduced(actions: Sequence[Action]) -> list[int]:
    """Return the stages in the order in which their gradients are complete."""
    return [action.stage for action in actions if action.kind == "reduce"]
