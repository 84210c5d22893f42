"""The choice of a plan before a launch: for ``parallel = "auto"``, stages of equal time, and fewer processes.

The launcher of each node searches; under torchrun and srun every rank does. The result depends on the config, the
devices and the hardware only, so that all get the same plan. Ranks compare their configs before the first step. No
torch for a config that names its plan.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel

from colossus.arithmetic import byte_count, counted, either, nearest_multiples, parse_bytes
from colossus.config import Config, ConfigError, resolve
from colossus.config.errors import as_config_errors
from colossus.config.plan_space import microbatch_counts, resized_plans, with_groups_of
from colossus.config.plans import describe_plan, describe_sizes, resolve_sizes, world_size
from colossus.hardware.hardware import Hardware
from colossus.hardware.named_hardware import default_hosts, named_hardware, typical_cpu
from colossus.launch.checks import check_required, is_on_cuda

if TYPE_CHECKING:
    from colossus.planner.plan_estimate import SearchResult

#: keys of ``parallel`` that no search varies
_NOT_SIZES = ("auto", "strategy", "rank_order")


class Planned(NamedTuple):
    """A resolved config, and lines for the user on its plan."""

    config: Config
    lines: list[str]


def resolve_planned(stated: Config, nproc: int | None = None, *, hosts: int | None = None) -> Planned:
    """Resolve a config, with a plan where it leaves one open, or names one for more processes than there are.

    Args:
        stated: what the config file and the overrides say.
        nproc: the processes of the whole run.
        hosts: the number of hosts over which they are spread; None: eight devices on each host, or one host of CPUs.

    Raises:
        ConfigError: see `resolve`; also where no plan fits, or the hardware is unknown.
    """
    lines = list[str]()

    def choose(config: Config) -> Config:
        if config.parallel.auto is not None:
            planned, more = _choose(config, nproc, hosts)
        else:
            planned, more = (config, []) if nproc is None else fit_plan(config, nproc)
        lines.extend(more)
        return planned

    config = resolve(stated, nproc, choose=choose)
    if config.parallel.pipeline.split == "time" and config.parallel.pipeline.size > 1:
        config = _with_stated_split(config, hosts)
    return Planned(config, lines)


def _choose(config: Config, nproc: int | None, hosts: int | None) -> Planned:
    """Return the config with the best plan, and lines on it for the user."""
    check_required(config)
    auto = config.parallel.auto
    assert auto is not None
    if nproc is None:
        raise ConfigError("parallel.auto: the number of processes is not known: give --nproc")
    opened, keep = left_open(config)
    with as_config_errors("parallel.auto"):
        hardware, hosts = _hardware_of(config, nproc, hosts)
        memory = hardware.memory_bytes if auto.memory is None else parse_bytes(auto.memory)
        search = importlib.import_module("colossus.planner.search").search  # here, since it imports torch
        result: SearchResult = search(opened, hardware, devices=nproc, hosts=hosts, memory=memory, top=1, keep=keep)
    if result.stopped:
        raise KeyboardInterrupt
    if not result.plans:
        least, lacking = result.nearest, result.nothing_fits(nproc, memory)
        assert least is not None
        raise ConfigError(
            f"parallel.auto: {lacking}:\n  {' '.join(least.overrides)}\n"
            f"  more processes, a smaller batch or a smaller model need less on each"
        )
    best = result.plans[0]
    lines = [
        f"plan        {describe_plan(best.config)}: the best of {result.tried:,} for {counted(nproc, 'process', 'es')}",
        f"predicted   {best.seconds:.3g} s a step, {byte_count(best.memory.fullest.total)} on the fullest rank; "
        f"{hardware.name}",
    ]
    return Planned(best.config, lines)


def left_open(config: Config) -> tuple[Config, dict[str, Any]]:
    """Return a config with ``parallel.auto`` without it, and the keys of ``parallel`` that a search must keep."""
    parallel = config.parallel
    more = {} if parallel.auto is None else parallel.auto.keep
    opened = config.model_copy(update={"parallel": parallel.model_copy(update={"auto": None})})
    return opened, {**_set_keys(parallel), **more}


def _set_keys(section: BaseModel) -> dict[str, Any]:
    """Return the keys of a plan that a config sets, nested."""
    keys = {}
    for key in section.model_fields_set.difference(_NOT_SIZES):
        value = getattr(section, key)
        keys[key] = _set_keys(value) if isinstance(value, BaseModel) else value
    return keys


def _hardware_of(config: Config, nproc: int, hosts: int | None) -> tuple[Hardware, int]:
    """Return the hardware of a run, and its number of hosts."""
    auto = config.parallel.auto
    if auto is not None and auto.hardware is not None:
        hardware = named_hardware(auto.hardware)
    elif is_on_cuda(config):
        import torch

        hardware = named_hardware(torch.cuda.get_device_name(0))
    else:
        hardware = typical_cpu(-(-nproc // (hosts or 1)))
    return hardware, hosts or default_hosts(hardware, nproc)


def _with_stated_split(config: Config, hosts: int | None) -> Config:
    """Return a config with the numbers of blocks of stages that take equal time."""
    check_required(config)
    estimate = importlib.import_module("colossus.planner.estimate")
    with as_config_errors("parallel.pipeline.split = 'time'", config.source):
        hardware, hosts = _hardware_of(config, world_size(config.parallel), hosts)
        stated: Config = estimate.Estimator(hardware, hosts=hosts).with_stated_split(config)[0]
    return stated


# -- fewer processes than the plan names --------------------------------------------------------------------------


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
        is_are = "is" if processes == 1 else "are"
        raise ConfigError(f"launch.min_processes = {least}, but there {is_are} {counted(processes, 'process', 'es')}")
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
    for fitted in _of_fewer_replicas(config, processes):
        try:
            resolved = resolve_sizes(fitted, processes)
        except ConfigError as error:
            problem = problem or error
            continue
        line = f"plan        {describe_plan(resolved)}: {processes} of {counted(world_size(parallel), 'process', 'es')}"
        return fitted, [line]
    assert problem is not None
    raise ConfigError([f"with {counted(processes, 'process', 'es')}: {text}" for text in problem.problems])


def _of_fewer_replicas(config: Config, processes: int) -> Iterator[Config]:
    """Yield the config with a plan of fewer data ranks, those with the largest microbatches first.

    Raises:
        ConfigError: the groups of experts do not fit the config's own data size.
    """
    parallel, schedule = config.parallel, config.schedule
    (plan,) = resized_plans(parallel, processes, axes=())
    with as_config_errors():
        plan = with_groups_of(parallel, plan)
    least = -(-schedule.microbatches * (parallel.data or 1) // (plan.data or 1))
    counts = [count for count in microbatch_counts(config, plan) if count >= least]
    for count in counts or [schedule.microbatches]:  # where none divides, the check of the plan says so
        update = {"parallel": plan, "schedule": schedule.model_copy(update={"microbatches": count})}
        yield config.model_copy(update=update)


# -- nodes -------------------------------------------------------------------------------------------------------


class NodeRange(NamedTuple):
    """The smallest and the largest number of nodes of a run."""

    min_nodes: int
    max_nodes: int

    def __str__(self) -> str:
        return str(self.max_nodes) if self.min_nodes == self.max_nodes else f"{self.min_nodes}:{self.max_nodes}"


class NodePlans:
    """The plans of one launch for each number of nodes; all nodes have the same number of processes.

    Args:
        stated: what the config file and the overrides say.
        nproc: the processes of each node; None: those of the config's plan, shared out over the largest number of
            nodes.
        nodes: the smallest and the largest number of nodes.
        endpoint: the host:port of the rendezvous.

    Attributes:
        max_plan: the plan for the largest number of nodes.
        local_ranks: the processes of each node.

    Raises:
        ConfigError: there is no plan for the largest or for the smallest number of nodes.
    """

    def __init__(self, stated: Config, nproc: int | None, nodes: NodeRange, endpoint: str | None) -> None:
        self._stated, self._nodes = stated, nodes
        #: number of nodes -> its plan; None where no plan fits
        self._plans: dict[int, Planned | None] = {}
        total = nproc * nodes.max_nodes if nproc is not None else None
        self.max_plan = resolve_planned(stated, total, hosts=nodes.max_nodes)
        config = self.max_plan.config
        check_required(config)
        self.local_ranks = _local_ranks(world_size(config.parallel), nodes.max_nodes, endpoint)
        if nodes.min_nodes < nodes.max_nodes:
            _check_range(config, nodes)
            if config.launch.min_processes is None:
                launch = config.launch.model_copy(update={"min_processes": nodes.min_nodes * self.local_ranks})
                self._stated = stated.model_copy(update={"launch": launch})
            self._plans[nodes.max_nodes] = self.max_plan
            self._load(nodes.min_nodes)

    def plan(self, num_nodes: int) -> tuple[Planned, int]:
        """Return the plan for the largest number of nodes, at most ``num_nodes``, that a plan fits; and that number."""
        if self._nodes.min_nodes == self._nodes.max_nodes:
            return self.max_plan._replace(lines=[]), num_nodes
        for number in range(num_nodes, self._nodes.min_nodes - 1, -1):
            if number not in self._plans:
                try:
                    self._load(number)
                except ConfigError:
                    self._plans[number] = None
            if (plan := self._plans[number]) is not None:
                return (plan._replace(lines=[]) if number == self._nodes.max_nodes else plan), number
        raise AssertionError("the smallest number of nodes has a plan")

    def _load(self, num_nodes: int) -> None:
        plan = resolve_planned(self._stated, num_nodes * self.local_ranks, hosts=num_nodes)
        check_required(plan.config)
        self._plans[num_nodes] = plan


def _check_range(config: Config, nodes: NodeRange) -> None:
    restarts = config.launch.restarts
    if restarts is None or not restarts.max:
        raise ConfigError(f"--nnodes {nodes}: a run continues with fewer nodes by a restart: set launch.restarts")
    if not config.checkpoint.every:
        raise ConfigError(f"--nnodes {nodes}: a run continues with more nodes from a checkpoint: set checkpoint.every")


def _local_ranks(processes: int, nodes: int, endpoint: str | None) -> int:
    if nodes > 1 and not endpoint:
        raise ConfigError(f"--nnodes {nodes} needs --rdzv-endpoint host:port: one of the nodes, and a free port there")
    host, _, port = (endpoint or "").rpartition(":")
    if nodes > 1 and not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(f"--rdzv-endpoint {endpoint}: must be host:port, with a port between 1 and 65535")
    if processes % nodes:
        raise ConfigError(f"--nnodes {nodes}: {processes} processes cannot be shared equally among the nodes")
    if processes // nodes > 4096:  # more than any machine has cores
        raise ConfigError(f"{processes // nodes} processes on one node are more than 4096: choose a smaller plan")
    return processes // nodes
