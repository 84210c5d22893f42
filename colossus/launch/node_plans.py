"""The plan of a run for the nodes that are present, and the number of nodes that it needs. No torch."""

from __future__ import annotations

from typing import NamedTuple

from colossus.config import Config, ConfigError
from colossus.config.plans import world_size
from colossus.launch.auto_plan import Planned, resolve_planned
from colossus.launch.checks import check_required


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
        for number in range(num_nodes, self._nodes.min_nodes, -1):
            if number not in self._plans:
                try:
                    self._load(number)
                except ConfigError:
                    self._plans[number] = None
            if (plan := self._plans[number]) is not None:
                return (plan._replace(lines=[]) if number == self._nodes.max_nodes else plan), number
        smallest = self._plans[self._nodes.min_nodes]
        assert smallest is not None
        return smallest, self._nodes.min_nodes

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
