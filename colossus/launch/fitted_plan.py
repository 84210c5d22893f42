"""A config's plan for fewer processes than it names: fewer replicas with the same global batch. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from colossus.arithmetic import counted, divisors, either, expert_factor, nearest_multiples
from colossus.config import Config, ConfigError
from colossus.config.plans import describe_plan, describe_sizes, resolve_sizes, world_size
from colossus.config.schema import Parallel


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
    for changes in _candidates(config, processes // others):
        try:
            fitted: Config = _changed(config, changes)
            resolved = resolve_sizes(fitted, processes)
        except ConfigError as error:
            problem = problem or error
            continue
        line = f"plan        {describe_plan(resolved)}: {processes} of {counted(world_size(parallel), 'process', 'es')}"
        return fitted, [line]
    assert problem is not None
    raise ConfigError([f"with {counted(processes, 'process', 'es')}: {text}" for text in problem.problems])


def _candidates(config: Config, data: int) -> Iterator[dict[str, int]]:
    """Yield changes of the config for ``data`` data ranks, those with the largest microbatches first."""
    parallel, batch, now = config.parallel, config.train.global_batch_size, config.schedule.microbatches
    assert parallel.data is not None
    of_data = {"parallel.data": data} | _groups(parallel, data)
    least = -(-now * parallel.data // data)
    numbers = [number for number in divisors(batch // data) if number >= least] if batch % data == 0 else []
    for number in numbers or [now]:  # where none divides, the check of the plan says so
        yield of_data | ({"schedule.microbatches": number} if number != now else {})


def _groups(parallel: Parallel, data: int) -> dict[str, int]:
    """Return changes of the sizes and numbers of groups of data ranks: of experts, of ZeRO, of hosts."""
    assert parallel.data is not None
    expert, shard, strategy = parallel.expert.size, parallel.zero.shard, parallel.strategy.options
    hosts, per_host = strategy.get("hosts"), strategy.get("per_host")
    try:
        # the consecutive ranks along data that share the experts
        neighbours = expert_factor(parallel.data, parallel.sequence.size, expert)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    num_sharing = math.gcd(neighbours, data)
    changes: dict[str, tuple[Any, int]] = {"parallel.expert.size": (expert, expert // neighbours * num_sharing)}
    if shard is not None:
        changes["parallel.zero.shard"] = shard, _divisor(data, shard, num_sharing)
    if isinstance(hosts, int):
        changes["parallel.strategy.hosts"] = hosts, _divisor(data, hosts * data // parallel.data)
    if isinstance(per_host, int):
        changes["parallel.strategy.per_host"] = per_host, _divisor(data, per_host)
    return {key: new for key, (old, new) in changes.items() if new != old}


def _divisor(data: int, most: int, unit: int = 1) -> int:
    """Return the largest divisor of ``data`` that is a multiple of ``unit`` and at most ``most``; else ``unit``."""
    return max((number for number in divisors(data) if number % unit == 0 and number <= most), default=unit)


def _changed(section: Any, changes: Mapping[str, int]) -> Any:
    """Return a copy of a section with other values at these keys."""
    update: dict[str, Any] = {}
    for path, value in changes.items():
        key, dot, rest = path.partition(".")
        update[key] = _changed(update.get(key, getattr(section, key)), {rest: value}) if dot else value
    return section.model_copy(update=update)


def _are(processes: int) -> str:
    return f"{'is' if processes == 1 else 'are'} {counted(processes, 'process', 'es')}"
