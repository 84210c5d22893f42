"""The layout of a plan, and the stages of its pipeline ranks."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from colossus.arithmetic import expert_factor
from colossus.config import Config, ConfigError
from colossus.config.schema import StrategySection
from colossus.planner.candidates import samples_of
from colossus.planner.layout_blocks import LayoutProfile
from colossus.planner.rank_stages import RankStages
from colossus.schedule.actions import Actions, placement
from colossus.schedule.build import make_schedule

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
    return any(action.kind == "backward_weight" for own in actions_of(config) for action in own)


def actions_of(config: Config) -> Actions:
    """Return the actions of all pipeline ranks.

    Raises:
        ConfigError: the schedule is wrong.
    """
    schedule = config.schedule
    options = tuple(sorted(schedule.options.items()))
    try:
        return _cached_schedule(schedule.type, config.parallel.pipeline.size, schedule.microbatches, options)
    except ValueError as error:
        raise ConfigError(f"schedule: {error}", config.source) from error


@lru_cache(maxsize=256)
def _cached_schedule(kind: Any, stages: int, microbatches: int, options: tuple[tuple[str, Any], ...]) -> Actions:
    return make_schedule(kind, stages, microbatches, **dict(options))


def stages_of(config: Config, profile: LayoutProfile) -> list[RankStages]:
    """Return the stages of each pipeline rank.

    Raises:
        ConfigError: there are more stages than blocks, or the split does not fit.
    """
    actions = actions_of(config)
    rank_of = placement(actions) or {0: 0}
    try:
        bounds = profile.facts.bounds(config.parallel.pipeline.split, len(rank_of))
    except ValueError as error:
        raise ConfigError(str(error), config.source) from error
    return [RankStages(rank, bounds, rank_of, own) for rank, own in enumerate(actions)]
