"""The pipeline of a run: its schedule, the stages of this rank, and the links between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from colossus.comm.links import Links
from colossus.config import Config
from colossus.context.parallel_context import ParallelContext
from colossus.engine.gradients.tied import shared_parameters
from colossus.layers.model_parallel import ModelParallel, model_parallel_of
from colossus.schedule.actions import Action, Actions, placement
from colossus.schedule.build import make_schedule
from colossus.schedule.memory import in_flight_of_stages
from colossus.schedule.partition.bounds import BlockCost
from colossus.schedule.partition.partition import Partition, keep_stages_of, make_partition
from colossus.schedule.runtime.executor import Executor, Stages, Watcher, forwards
from colossus.schedule.runtime.stage_scope import StageRng
from colossus.schedule.runtime.transport import Transport


class Pipeline:
    """What is known before the model is built, and from `cut` on its partition; without a pipeline, one stage.

    Attributes:
        actions: what this rank does in a step.
        rank_of: stage -> index along the pipeline axis.
        partition: None when there is one stage.
    """

    def __init__(self, config: Config, context: ParallelContext) -> None:
        schedule = config.schedule
        stages = context.size("pipeline")
        self._context, self._split = context, config.parallel.pipeline.split
        self._all: Actions = make_schedule(schedule.type, stages, schedule.microbatches, **schedule.options)
        self.rank_of: Mapping[int, int] = placement(self._all)
        self.rank = context.index("pipeline")
        self.actions: Sequence[Action] = self._all[self.rank]
        self.partition: Partition | None = None
        self._forwards: dict[int, list[Action]] = {}
        self._links: Links | None = None

    @property
    def last(self) -> int:
        """Number of the last stage of the model."""
        return max(self.rank_of)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights are made apart."""
        return any(action.kind == "backward_weight" for action in self.actions)

    @property
    def needs_costs(self) -> bool:
        """Whether the blocks of the model must be measured before it is cut."""
        return self.last > 0 and self._split in ("time", "memory")

    def cut(self, model: nn.Module, costs: Sequence[BlockCost] | None = None) -> None:
        """Leave a model on the meta device what this rank has of it.

        Args:
            costs: of the model's blocks; without those that it needs, it is cut by parameters, for a first look.

        Raises:
            ValueError: see `make_partition`.
        """
        if not self.last:
            return
        split = "parameters" if costs is None and self.needs_costs else self._split
        in_flight = in_flight_of_stages(self._all)
        partition = make_partition(model, self.rank_of, split, costs=costs, in_flight=in_flight)
        keep_stages_of(model, partition, self.rank)
        self.partition = partition

    def draws(self) -> StageRng | None:
        """The generators of this rank's stages, for what draws from torch's own (a plain nn.Dropout, say)."""
        if self.partition is None:
            return None
        door = self._context.index(model_parallel_of(self._context).regions.user.batch)
        return StageRng(self._context.rng.key("torch", door, self.rank), self._context.device)

    def calls(self, model: nn.Module) -> dict[int, Callable[[Any], Any]]:
        """What runs each stage of this rank."""
        if self.partition is None:
            return {0: model}
        return {stage: self.partition.call(stage) for stage in self.partition.stages_on(self.rank)}

    def parameters_on(self, stage: int, model: nn.Module) -> list[nn.Parameter]:
        """Those that a stage of this rank uses."""
        if self.partition is None:
            return list(model.parameters())
        held = dict(model.named_parameters())
        return [held[name] for name in self.partition.parameters_on(stage)]

    def shared(self, model: nn.Module) -> list[tuple[nn.Parameter, tuple[int, ...]]]:
        """Parameters that other ranks hold, too, with the pipeline ranks that do."""
        if self.partition is None:
            return []
        ranks_of = {name: self.partition.ranks_of(name) for name in self.partition.names}
        return shared_parameters(dict(model.named_parameters()), ranks_of)

    def executor(self, stages: Stages, parallel: ModelParallel, watch: Watcher | None = None) -> Executor:
        """What runs the actions. All ranks of the pipeline must call."""
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
        return Executor(stages, self.rank_of, transport, parallel, watch)

    def forwards(self, microbatches: int) -> list[Action]:
        """What this rank does to evaluate at most as many microbatches as a step has."""
        if microbatches not in self._forwards:
            self._forwards[microbatches] = forwards(self.actions, microbatches)
        return self._forwards[microbatches]

    def close(self) -> None:
        if self._links is not None:
            self._links.close()
