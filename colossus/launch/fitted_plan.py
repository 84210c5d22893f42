"""A config's plan for fewer processes than it names: fewer replicas with the same global batch. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from colossus.arithmetic import counted, either, nearest_multiples
from colossus.config import Config, ConfigError
from colossus.config.plan_space import microbatch_counts, resized_plans, with_groups_of
from colossus.config.plans import describe_plan, describe_sizes, resolve_sizes, world_size


def fit_plan(config: Config, processes: int) -> tuple[Config, list[str]]:
    """Return the config with a plan for ``processes`` processes, where ``launch.min_processes`` allows fewer.

    Tensor, pipeline and sequence stay as they are. Data becomes smaller, and so do sizes that are counted in data ranks
    (groups of experts and of ZeRO, hosts of a strategy). The global batch stays. There are more microbatches, whose
    size is as near to the old one as the numbers allow, and not larger.

    Returns:
        The config, and lines for the user.

    Raises:
        ConfigError: there are fewer processes than allowed, or no such plan fits; with the arithmetic.
    """
    least, parallel = config.launch.min_processes, config.parallel
    if least is None or parallel.auto is not None:
        return config, []
    if processes < least:
        raise ConfigError(f"launch.min_processes = {least}, but there {_are(processes)}")
    if parallel.data is None or world_size(parallel) <= processes:
        return config, []
    others = world_size(parallel) // parallel.data
    if processes % others:
        unsplit = describe_sizes(parallel.model_copy(update={"data": None}))
        fits = either(nearest_multiples(processes, others))
        raise ConfigError(
            f"parallel: {unsplit} = {others} does not divide {counted(processes, 'process', 'es')}, and only data may "
            f"become smaller; {fits} would do"
        )
    problem = None
    for fitted in _candidates(config, processes):
        try:
            resolved = resolve_sizes(fitted, processes)
        except ConfigError as error:
            problem = problem or error
            continue
        line = f"plan        {describe_plan(resolved)}: {processes} of {counted(world_size(parallel), 'process', 'es')}"
        return fitted, [line]
    assert problem is not None
    raise ConfigError([f"with {counted(processes, 'process', 'es')}: {text}" for text in problem.problems])


def _candidates(config: Config, processes: int) -> Iterator[Config]:
    """Yield the config with a plan of fewer data ranks, those with the largest microbatches first."""
    parallel, schedule = config.parallel, config.schedule
    (plan,) = resized_plans(parallel, processes, axes=())
    plan = with_groups_of(parallel, plan)
    least = -(-schedule.microbatches * (parallel.data or 1) // (plan.data or 1))
    counts = [count for count in microbatch_counts(config, plan) if count >= least]
    for count in counts or [schedule.microbatches]:  # where none divides, the check of the plan says so
        update = {"parallel": plan, "schedule": schedule.model_copy(update={"microbatches": count})}
        yield config.model_copy(update=update)


def _are(processes: int) -> str:
    return f"{'is' if processes == 1 else 'are'} {counted(processes, 'process', 'es')}"
