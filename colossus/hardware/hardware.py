"""What a device and the links between devices are asked for: how long a product and a collective take."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from colossus.arithmetic import counted
from colossus.comm.accounting import sent

#: collectives whose time is asked for, and messages; bytes are counted as `colossus.comm.accounting.sent` counts them
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
    """A device, and what joins such devices.

    Attributes:
        name: of the device, with where the figures are from.
        is_measured: False where they are a data sheet's.
        memory_bytes: of each device.
        network: of each device, to devices of other hosts; None where it is not known. Where the devices of a host
            share a card, each has its part of the card's bandwidth.
        operator_seconds: that Python and torch need to start one ATen operator of a training step, in the mean over
            forward and backward, views among them.
        at_once: ranks of a host that run without taking each other's cores; None: all.
        overlaps: whether collectives run beside what their ranks compute.
    """

    name: str
    is_measured: bool
    memory_bytes: float
    network: Link | None
    operator_seconds: float
    at_once: int | None
    overlaps: bool

    @abstractmethod
    def matmul_seconds(self, m: int, n: int, k: int, dtype: str) -> float:
        """Of a product [m, k] x [k, n]; never less where a dim is larger.

        Args:
            dtype: ``bf16``, ``fp32``, ..

        Raises:
            ValueError: where nothing is known of this dtype.
        """

    @abstractmethod
    def attention_seconds(self, heads: int, length: int, head_dim: int, dtype: str, *, backward: bool = False) -> float:
        """Of causal attention of ``heads`` (of all samples together), its forward or its backward."""

    @abstractmethod
    def memory_seconds(self, num_bytes: float, operator: str = "") -> float:
        """In which a device reads and writes ``num_bytes`` together, as an elementwise operation does.

        Args:
            operator: of ATen (``gelu_backward``); a processor takes longer for some than for others.
        """

    def peak_flops(self, dtype: str) -> float | None:
        """FLOP/s of a device by its data sheet, that utilisation is of; None where there is none."""
        return None

    def eager_seconds(self, work: float, operators: int) -> float:
        """Of so many ATen operators, started one by one, whose work takes ``work`` seconds together.

        A processor starts each and then does its work. To a GPU they are sent ahead, so that the longer of both counts.
        """
        starting = operators * self.operator_seconds
        return max(work, starting) if self.overlaps else work + starting

    def slowdown(self, ranks_on_host: int) -> float:
        """How many times as long all that is asked for here takes, while so many ranks of a host are busy.

        Of ranks that wait for each other a step takes as long as without it, or as the busy seconds of all ranks of a
        host over `at_once`, whichever is longer.
        """
        return 1.0 if self.at_once is None else max(1.0, ranks_on_host / self.at_once)

    @abstractmethod
    def on_one_host(self, operation: str, ranks: int, held: float) -> float:
        """`collective_seconds` of two or more ranks as if one host had them all."""

    def collective_seconds(self, operation: str, ranks: int, held: float, *, hosts: int = 1) -> float:
        """Of a collective, or of a message one way; never less for more bytes.

        Over several hosts it takes as long as on one, or as the network needs, and in addition the network's latency
        for each step from host to host. All groups of the same axes do the same at the same time, and each rank has its
        own part of the network. What goes round a ring crosses from host to host once, in as many rings as the group
        has ranks on a host, each over another rank's part (as NCCL does); of an all-to-all each rank sends its own.

        Args:
            operation: one of `OPERATIONS`.
            held: bytes that a rank holds before, as in `colossus.comm.accounting.sent`: the shard of an all-gather.
            hosts: over which the ranks are spread evenly, in order.

        Raises:
            ValueError: where the operation is not known, or no link that joins these ranks.
        """
        if operation not in OPERATIONS:
            raise ValueError(f"no time of {operation!r} is known; known: {', '.join(OPERATIONS)}")
        if ranks == 1:
            return 0.0
        within = self.on_one_host(operation, ranks, held)
        if hosts == 1:
            return within
        if self.network is None:
            raise ValueError(
                f"{self.name} knows no network, and {operation} over {counted(hosts, 'host')} needs one: give it "
                f"network=Link(latency, bandwidth), in seconds and bytes per second of a device"
            )
        through = bytes_through_network(operation, ranks, held, hosts) / self.network.bandwidth
        return max(within, through) + steps(operation, hosts) * self.network.latency


def ranks_at_once(cores: int, threads: int) -> int:
    """Ranks of so many threads that each have a core for each."""
    return max(1, cores // threads)


def bytes_sent(operation: str, ranks: int, held: float) -> float:
    """What one rank sends, as it is counted; a message is its own size."""
    return held if operation == "send" else sent(operation, ranks, held)


def bytes_through_network(operation: str, ranks: int, held: float, hosts: int) -> float:
    """Of these what each rank's part of the network carries, of ranks that are spread evenly over several hosts."""
    if operation == "send":
        return held
    if operation == "all_to_all":
        return held * (hosts - 1) / hosts
    return bytes_sent(operation, ranks, held) * hosts / ranks


def held_of(operation: str, ranks: int, sent_bytes: float) -> float:
    """What a rank holds before, of what it sends: the inverse of `bytes_sent`."""
    return sent_bytes if operation == "send" else sent_bytes / sent(operation, ranks, 1.0)


def steps(operation: str, ranks: int) -> int:
    """Messages that follow each other in a collective: round a ring; an all-reduce up and down a tree where that is
    shorter (Sanders, Speck and Traeff, 2009: two binary trees have the ring's bandwidth).
    """
    if operation == "all_reduce":
        return 2 * min(ranks - 1, math.ceil(math.log2(ranks)))
    return 1 if operation == "send" else ranks - 1


def fit_link(points: list[tuple[float, float]]) -> Link:
    """Latency and bandwidth of ``seconds = latency + sent / bandwidth``, by least squares of relative errors.

    Relative: sizes span four powers of ten, and the latency would else be what is left over of the largest.

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
