"""The parameter servers of a run, which the launcher of each node starts. No torch."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colossus.arithmetic import counted
from colossus.config import Config
from colossus.config.plans import strategy_options
from colossus.launch.report import describe_death
from colossus.server.process import ServerProcess, new_token, write_environment

if TYPE_CHECKING:
    from colossus.launch.nodes import Nodes

#: the folder of servers' logs, in the run folder
LOGS = "logs"


def num_servers(config: Config, nnodes: int) -> int:
    """Return the number of servers of a run: the strategy's ``servers``, or one on each node where that is None."""
    options: Any = strategy_options(config)
    if not hasattr(options, "servers"):
        return 0
    wanted: int | None = options.servers
    return nnodes if wanted is None else wanted


def servers_of_node(node: int, number: int, nnodes: int) -> list[int]:
    """Return the indices of a node's servers, spread evenly, with consecutive ones on the same node."""
    return [index for index in range(number) if index * nnodes // number == node]


def describe_servers(number: int, nnodes: int) -> str:
    """Return a text on the servers: ``2 processes beside the workers, on 2 of 4 nodes``."""
    processes = f"{counted(number, 'process', 'es')} beside the workers"
    return processes if nnodes == 1 else f"{processes}, on {min(number, nnodes)} of {nnodes} nodes"


def start_servers(
    started: list[ServerProcess], number: int, folder: Path, timeout_seconds: float, nodes: Nodes | None
) -> None:
    """Start the servers of this node, and set the variables by which workers find all servers.

    All nodes call this at the same time.

    Args:
        started: receives the servers of this node, also where not all could be started.
        number: the number of servers of the run.
        folder: the run folder.
        timeout_seconds: the silence after which a server gives up a worker.
        nodes: the nodes of the run; None where there is one.

    Raises:
        RuntimeError: on all nodes, where a server could not be started.
    """
    text = new_token().hex()
    if nodes is not None:
        text = nodes.from_first("servers/token", lambda: text)
    token, logs, problem = bytes.fromhex(text), folder / LOGS, ""
    node, num_nodes, host = (0, 1, "127.0.0.1") if nodes is None else (nodes.node, nodes.num_nodes, nodes.address)
    logs.mkdir(parents=True, exist_ok=True)
    try:
        # a server ends with the thread that starts it, so this must be the main thread
        for index in servers_of_node(node, number, num_nodes):
            log = logs / f"server{index}.log"
            started.append(ServerProcess(index, token, host=host, timeout_seconds=timeout_seconds, log=log))
        for server in started:
            server.wait_until_ready()
    except (OSError, RuntimeError) as error:
        problem = f"a server could not be started on host {host}: {error}"
    mine: Any = ({server.index: server.endpoint for server in started}, problem)
    all_nodes = [mine] if nodes is None else nodes.exchange("servers", mine)
    if problems := [problem for _, problem in all_nodes if problem]:
        raise RuntimeError("; ".join(problems))
    endpoints = {int(index): endpoint for of_node, _ in all_nodes for index, endpoint in of_node.items()}
    write_environment([endpoints[index] for index in range(number)], token)


def describe_dead_server(server: ServerProcess) -> str:
    """Return a text on the death of a server, the first line of which is the cause."""
    how, host = describe_death(server.returncode or 0), socket.gethostname()
    return f"server {server.index} (host {host}, process {server.process}) {how}\nits log: {server.log}"
