"""The plan of a run for the nodes that are there, and how many of them it needs. No torch."""

from __future__ import annotations

from typing import NamedTuple

from colossus.config import Config, ConfigError
from colossus.config.plans import world_size
from colossus.launch.auto_plan import Planned, load_planned
from colossus.launch.checks import check_given


class NodeRange(NamedTuple):
    """How many nodes a run has: at least, at most."""

    least: int
    most: int

    def __str__(self) -> str:
        return str(self.most) if self.least == self.most else f"{self.least}:{self.most}"


class NodePlans:
    """Of one launch: which plan it has on how many nodes, all with as many processes each.

    Args:
        nproc: processes on each node; None: those of the config's plan, shared out over the most nodes.

    Attributes:
        of_most: the plan for all nodes.
        local_ranks: processes of each node.

    Raises:
        ConfigError: when there is no plan for the most or for the fewest.
    """

    def __init__(
        self, config_path: str, overrides: list[str], nproc: int | None, nodes: NodeRange, endpoint: str | None
    ) -> None:
        self._path, self._overrides, self._nodes = config_path, overrides, nodes
        self._known: dict[int, Planned | None] = {}
        total = nproc * nodes.most if nproc is not None else None
        self.of_most = load_planned(config_path, self._overrides, total, hosts=nodes.most)
        config = self.of_most.config
        check_given(config)
        self.local_ranks = _local_ranks(world_size(config.parallel), nodes.most, endpoint)
        if nodes.least < nodes.most:
            _check_range(config, nodes)
            if config.launch.min_processes is None:
                self._overrides = [*overrides, f"launch.min_processes={nodes.least * self.local_ranks}"]
            self._known[nodes.most] = self.of_most
            self._load(nodes.least)

    def plan(self, num_nodes: int) -> tuple[Planned, int]:
        """The plan for so many nodes, and how many it needs: the most for which one fits."""
        if self._nodes.least == self._nodes.most:
            return self.of_most._replace(told=[]), num_nodes
        for number in range(num_nodes, self._nodes.least, -1):
            if number not in self._known:
                try:
                    self._load(number)
                except ConfigError:
                    self._known[number] = None
            if (found := self._known[number]) is not None:
                return (found._replace(told=[]) if number == self._nodes.most else found), number
        least = self._known[self._nodes.least]
        assert least is not None
        return least, self._nodes.least

    def _load(self, num_nodes: int) -> None:
        found = load_planned(self._path, self._overrides, num_nodes * self.local_ranks, hosts=num_nodes)
        check_given(found.config)
        self._known[num_nodes] = found


def _check_range(config: Config, nodes: NodeRange) -> None:
    restarts = config.launch.restarts
    if restarts is None or not restarts.max:
        raise ConfigError(f"--nnodes {nodes}: a run goes on with fewer nodes by a restart: set launch.restarts")
    if not config.checkpoint.every:
        raise ConfigError(f"--nnodes {nodes}: a run goes on with more nodes from a checkpoint: set checkpoint.every")


def _local_ranks(processes: int, nodes: int, endpoint: str | None) -> int:
    if nodes > 1 and not endpoint:
        raise ConfigError(f"--nnodes {nodes} needs --rdzv-endpoint host:port: one of the nodes, and a free port there")
    host, _, port = (endpoint or "").rpartition(":")
    if nodes > 1 and not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(f"--rdzv-endpoint {endpoint}: must be host:port, with a port between 1 and 65535")
    if processes % nodes:
        raise ConfigError(f"--nnodes {nodes}: {processes} processes cannot be shared equally among the nodes")
    if processes // nodes > 4096:  # no machine has cores for more
        raise ConfigError(f"{processes // nodes} processes on one node are more than 4096: choose a smaller plan")
    return processes // nodes
