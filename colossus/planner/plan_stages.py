"""The layout of a plan, and the stages and blocks of its pipeline ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from colossus.arithmetic import expert_factor
from colossus.config import Config, ConfigError
from colossus.config.schema import StrategySection
from colossus.planner.candidates import samples_of
from colossus.planner.parameter_facts import ModelFacts
from colossus.schedule.actions import LAST_USE, Action, Actions, in_flight, placement
from colossus.schedule.build import make_schedule


@dataclass(frozen=True)
class RankStages:
    """The stages of a rank.

    Attributes:
        rank: index along the pipeline axis.
        bounds: stage s has ``blocks[bounds[s]:bounds[s + 1]]`` of the model's chain.
        rank_of: stage -> index along the pipeline axis.
        actions: actions of this rank in a step.
    """

    rank: int
    bounds: Sequence[int]
    rank_of: Mapping[int, int]
    actions: Sequence[Action]

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """Return the stages of this rank, ascending."""
        return tuple(stage for stage in range(len(self.bounds) - 1) if self.rank_of[stage] == self.rank)

    def blocks_of(self, stage: int) -> range:
        return range(self.bounds[stage], self.bounds[stage + 1])

    @cached_property
    def stage_of(self) -> Mapping[int, int]:
        """Return the stage of each block, for the blocks of all ranks."""
        return {block: stage for stage in range(len(self.bounds) - 1) for block in self.blocks_of(stage)}

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Return the stages of this rank in the order in which their gradients are reduced."""
        return tuple(action.stage for action in self.actions if action.kind == "reduce")

    @cached_property
    def _last(self) -> Mapping[int, int]:
        """Return the index of the last action of each stage that uses its weights; its gradients are complete then."""
        return {action.stage: index for index, action in enumerate(self.actions) if action.kind in LAST_USE}

    @cached_property
    def last_uses(self) -> frozenset[int]:
        """Return the ids of these actions: an action is one object in all lists."""
        return frozenset(id(self.actions[index]) for index in self._last.values())

    @cached_property
    def in_flight(self) -> int:
        """Return the most activations that the rank stores, see `colossus.schedule.actions.in_flight`."""
        return max(in_flight(self.actions))

    @cached_property
    def splits_backward(self) -> bool:
        return any(action.kind == "backward_weight" for action in self.actions)

    @cached_property
    def starts_early(self) -> frozenset[int]:
        """Return the stages whose reductions may start during their last backward: earlier stages are reduced by then.

        With a split backward there are none.
        """
        last = self._last
        reduced = {action.stage: index for index, action in enumerate(self.actions) if action.kind == "reduce"}
        return frozenset(
            stage
            for number, stage in enumerate(self.order)
            if not self.splits_backward and all(reduced[before] < last[stage] for before in self.order[:number])
        )

    def ranks_with(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """Return the pipeline ranks that have any of these blocks, that of the lowest stage first."""
        if len(blocks) == 1:
            return (self.rank_of[self.stage_of[blocks[0]]],)
        return tuple(dict.fromkeys(self.rank_of[self.stage_of[block]] for block in sorted(blocks)))

    def stages_with(self, blocks: Sequence[int]) -> list[int]:
        """Return this rank's stages with any of these blocks, in the order in which they are reduced."""
        if len(blocks) == 1:
            stage = self.stage_of[blocks[0]]
            return [stage] if stage in self.stages else []
        here = {stage for block in blocks if (stage := self.stage_of[block]) in self.stages}
        return sorted(here, key=self.order.index)


# -- layouts --------------------------------------------------------------------------------------------------


def layout_key(config: Config) -> tuple[Any, ...]:
    """Return a key of everything that a profile depends on."""
    parallel, train = config.parallel, config.train
    return (
        parallel.tensor,
        parallel.sequence,
        parallel.expert.size,
        train.activation_checkpoint,
        train.precision,
        samples_of(config),
    )


def layout_config(config: Config, *, is_sharded: bool) -> Config:
    """Return a config of the smallest plan with the same layout.

    Args:
        config: the config.
        is_sharded: whether the plan stores parameters apart from those that compute sees. These are then in the dtype
            of products: 1D neither moves nor casts them, and their scope is no part of the layout.
    """
    parallel = config.parallel
    tensor = parallel.tensor
    if is_sharded and tensor.mode == "1d":
        tensor = tensor.model_copy(update={"weights": "matmul"})
    data = expert_factor(parallel.data or 1, parallel.sequence.size, parallel.expert.size)  # experts need so many
    small = parallel.model_copy(
        update={
            "data": data,
            "tensor": tensor,
            "pipeline": parallel.pipeline.model_copy(update={"size": 1}),
            "zero": type(parallel.zero)(),
            "strategy": StrategySection(),
        }
    )
    train = config.train.model_copy(update={"global_batch_size": data * samples_of(config), "batch_ramp": None})
    return config.model_copy(update={"parallel": small, "train": train, "schedule": type(config.schedule)()})


# -- pipelines ------------------------------------------------------------------------------------------------


def splits_backward(config: Config) -> bool:
    """Return whether the schedule runs wgrad apart from dgrad."""
    return any(action.kind == "backward_weight" for own in _schedule(config).actions for action in own)


def with_few_microbatches(config: Config) -> Config:
    """Return the config with at most two microbatches for each pipeline rank, which show all that a rank does."""
    schedule = config.schedule
    few = min(schedule.microbatches, 2 * config.parallel.pipeline.size)
    return config.model_copy(update={"schedule": schedule.model_copy(update={"microbatches": few})})


def stages_of(config: Config, model: ModelFacts) -> Sequence[RankStages]:
    """Return the stages of each pipeline rank.

    Raises:
        ConfigError: the schedule is wrong, there are more stages than blocks, or the split does not fit.
    """
    schedule = _schedule(config)
    try:
        bounds = model.bounds(config.parallel.pipeline.split, len(schedule.rank_of))
    except ValueError as error:
        raise ConfigError(str(error), config.source) from error
    return schedule.stages(bounds)


def num_stages(config: Config) -> int:
    """Return the number of stages of all pipeline ranks.

    Raises:
        ConfigError: the schedule is wrong.
    """
    return len(_schedule(with_few_microbatches(config)).rank_of)


class _Schedule:
    """The actions of all pipeline ranks, and their stages for each split of a model."""

    def __init__(self, actions: Actions) -> None:
        self.actions, self.rank_of = actions, placement(actions) or {0: 0}
        self._stages: dict[tuple[int, ...], Sequence[RankStages]] = {}

    def stages(self, bounds: tuple[int, ...]) -> Sequence[RankStages]:
        if bounds not in self._stages:
            self._stages[bounds] = [
                RankStages(rank, bounds, self.rank_of, own) for rank, own in enumerate(self.actions)
            ]
        return self._stages[bounds]


def _schedule(config: Config) -> _Schedule:
    schedule = config.schedule
    options = tuple(sorted(schedule.options.items()))
    try:
        return _cached_schedule(schedule.type, config.parallel.pipeline.size, schedule.microbatches, options)
    except ValueError as error:
        raise ConfigError(f"schedule: {error}", config.source) from error


@lru_cache(maxsize=256)
def _cached_schedule(kind: Any, stages: int, microbatches: int, options: tuple[tuple[str, Any], ...]) -> _Schedule:
    return _Schedule(make_schedule(kind, stages, microbatches, **dict(options)))
