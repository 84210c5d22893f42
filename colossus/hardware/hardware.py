"""The interface of hardware: the seconds of products, attention, operators and collectives on some device."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from colossus.arithmetic import counted
from colossus.comm.accounting import sent

#: collectives, and point-to-point messages, that `Hardware` can time (bytes: `colossus.comm.accounting.sent`)
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


@dataclass(frozen=True)
class Link:
    """One direction of a link of a device.

    Attributes:
        latency: seconds of a step over it.
        bandwidth: bytes per second.
    """

    latency: float
    bandwidth: float


class Hardware(ABC):
    """A kind of device and the links between such devices.

    Attributes:
        name: name of the device and the source of its figures.
        is_measured: whether the figures are measured, not a data sheet's.
        memory_bytes: memory of each device.
        network: link of each device to devices of other hosts, None if it is not known. Devices that share a network
            card each have their part of its bandwidth.
        operator_seconds: seconds that Python and torch need to start one ATen operator of a training step: the mean
            over forward and backward, views included.
        at_once: ranks of a host that can be busy without taking each other's cores; None for all.
        overlaps: whether collectives run while their ranks compute.
        occupied: fraction of the device that such a collective takes from the computation beside it.
    """

    name: str
    is_measured: bool
    memory_bytes: float
    network: Link | None
    operator_seconds: float
    at_once: int | None
    overlaps: bool
    occupied: float = 0.0

    @abstractmethod
    def matmul_seconds(self, m: int, n: int, k: int, dtype: str) -> float:
        """Return the seconds of a product [m, k] x [k, n]. They never fall when a dim grows.

        Args:
            m, n, k: the dims.
            dtype: dtype of the factors: ``bf16``, ``fp32``, ..

        Raises:
            ValueError: the hardware has no figure for this dtype.
        """

    def products_seconds(self, count: float, m: int, n: int, k: int, dtype: str) -> float:
        """Return the seconds of ``count`` products that one operator makes."""
        return count * self.matmul_seconds(m, n, k, dtype)

    @abstractmethod
    def attention_seconds(self, heads: int, length: int, head_dim: int, dtype: str, *, backward: bool = False) -> float:
        """Return the seconds of the forward or the backward of causal attention.

        Args:
            heads: heads of all samples together.
            length: tokens of a sample.
            head_dim: features of a head.
            dtype: dtype of queries, keys and values.
            backward: whether the backward is meant.
        """

    @abstractmethod
    def memory_seconds(self, num_bytes: float, operator: str = "") -> float:
        """Return the seconds of an elementwise operation, which reads and writes memory.

        Args:
            num_bytes: bytes read and written, together.
            operator: name of the ATen operator (``gelu_backward``): a CPU takes longer for some than for others.
        """

    def peak_flops(self, dtype: str) -> float | None:
        """Return the peak FLOP/s that utilisation is a fraction of, None if no data sheet has it."""
        return None

    def eager_seconds(self, work: float, operators: int) -> float:
        """Return the seconds of ATen operators that are started one by one.

        A CPU starts an operator and then does its work. A GPU's operators are queued ahead, so that only the longer of
        all starts and all work counts.

        Args:
            work: seconds of the operators' own work, together.
            operators: number of operators.
        """
        starting = operators * self.operator_seconds
        return max(work, starting) if self.overlaps else work + starting

    def slowdown(self, ranks_on_host: int) -> float:
        """Return the factor by which work takes longer while ``ranks_on_host`` ranks of a host are busy at once.

        Ranks that wait for each other are not busy all the time. Their step takes the longest of three times: without a
        slowdown, in turns (`colossus.planner.step_timeline.play_step`), and the busy seconds of all ranks of a host
        divided by `at_once`.
        """
        return 1.0 if self.at_once is None else max(1.0, ranks_on_host / self.at_once)

    @abstractmethod
    def on_one_host(self, operation: str, ranks: int, input_bytes: float) -> float:
        """Return `collective_seconds` of two or more ranks that share one host."""

    def collective_seconds(self, operation: str, ranks: int, input_bytes: float, *, hosts: int = 1) -> float:
        """Return the seconds of a collective, or of one message. They never fall when the bytes grow.

        Over several hosts it takes the longer of two times, that on one host and that of its bytes through the network,
        and in addition the network's latency for each step from host to host. All groups along the same axes run at
        the same time, and each rank has its own part of the network. A ring crosses from host to host once. A group
        runs as many rings as it has ranks on a host, each over the part of another rank (as NCCL does). In an
        all-to-all each rank sends its own chunks.

        Args:
            operation: one of `OPERATIONS`.
            ranks: size of the group.
            input_bytes: bytes of a rank's input, as in `colossus.comm.accounting.sent`: for an all-gather its shard.
            hosts: hosts over which the ranks are spread evenly, in order.

        Raises:
            ValueError: the operation is none of these, or no link joins the hosts.
        """
        if operation not in OPERATIONS:
            raise ValueError(f"{operation!r} is no operation that can be timed; choose one of {', '.join(OPERATIONS)}")
        if ranks == 1:
            return 0.0
        within = self.on_one_host(operation, ranks, input_bytes)
        if hosts == 1:
            return within
        if self.network is None:
            raise ValueError(
                f"{self.name} has no network, and {operation} over {counted(hosts, 'host')} needs one: pass "
                f"network=Link(latency, bandwidth), in seconds and bytes per second of a device"
            )
        through = bytes_through_network(operation, ranks, input_bytes, hosts) / self.network.bandwidth
        return max(within, through) + steps(operation, hosts) * self.network.latency


def ranks_at_once(cores: int, threads: int) -> int:
    """Return how many ranks of ``threads`` threads can run at once with a core for each thread."""
    return max(1, cores // threads)


def bytes_sent(operation: str, ranks: int, input_bytes: float) -> float:
    """Return the bytes that a rank sends, by the count of `colossus.comm.accounting.sent`; a message's are its size."""
    return input_bytes if operation == "send" else sent(operation, ranks, input_bytes)


def bytes_through_network(operation: str, ranks: int, input_bytes: float, hosts: int) -> float:
    """Return the bytes that each rank's part of the network carries, if the ranks are spread evenly over the hosts."""
    if operation == "send":
        return input_bytes
    if operation == "all_to_all":
        return input_bytes * (hosts - 1) / hosts
    return bytes_sent(operation, ranks, input_bytes) * hosts / ranks


def input_bytes_of(operation: str, ranks: int, sent_bytes: float) -> float:
    """Return the bytes of a rank's input from the bytes that it sends: the inverse of `bytes_sent`."""
    return sent_bytes if operation == "send" else sent_bytes / sent(operation, ranks, 1.0)


def steps(operation: str, ranks: int) -> int:
    """Return the number of messages that follow each other in a collective.

    They go round a ring. An all-reduce goes up and down a tree if that is shorter (Sanders, Speck and Traeff, 2009: two
    binary trees reach the ring's bandwidth).
    """
    if operation == "all_reduce":
        return 2 * min(ranks - 1, math.ceil(math.log2(ranks)))
    return 1 if operation == "send" else ranks - 1


def fit_link(points: list[tuple[float, float]]) -> Link:
    """Fit ``seconds = latency + sent / bandwidth`` by least squares of relative errors.

    The errors are relative because sizes span four powers of ten: absolute errors of the largest would drown the
    latency.

    Args:
        points: (bytes sent, seconds), at least two.
    """
    # Minimise the sum of (latency u + slope v - 1)^2 with u = 1 / seconds, v = sent / seconds; neither below zero.
    rows = [(1 / seconds, size / seconds) for size, seconds in points]
    uu, uv, vv = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    u, v = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = uu * vv - uv * uv
    latency, slope = ((u * vv - v * uv) / determinant, (v * uu - u * uv) / determinant) if determinant else (0.0, 0.0)
    if latency < 0 or slope <= 0:
        latency, slope = 0.0, v / vv
    return Link(latency, 1 / slope)
