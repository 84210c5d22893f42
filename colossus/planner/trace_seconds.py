"""The seconds of a trace on a device: collectives overlap with computation until they are waited for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from colossus.hardware.hardware import Hardware, bytes_sent
from colossus.hardware.host_placement import Placement
from colossus.planner.plan_estimate import AxisCost, StoredBytes
from colossus.planner.trace import Accumulation, AttentionCall, Awaited, Event, Operator, Product, Started, Trace

#: operators of an update for each parameter
_UPDATE_OPERATORS = 4


@dataclass
class Played:
    """The times of a trace.

    Attributes:
        seconds: seconds from its first event to its last.
        repeated: the part of these that is recomputation, without exposed collectives.
        accumulating: the part that adds gradients to those of microbatches before.
        axes: cost of its collectives, by axes.
    """

    seconds: float = 0.0
    repeated: float = 0.0
    accumulating: float = 0.0
    axes: defaultdict[str, AxisCost] = field(default_factory=lambda: defaultdict(AxisCost))

    @property
    def exposed(self) -> float:
        return sum(cost.exposed for cost in self.axes.values())


class TracePlayer:
    """Simulates traces on devices of one kind.

    Args:
        hardware: speed of devices and links.
        placement: ranks on hosts.
        times: samples of the microbatch over those of the trace: work and bytes are multiplied by it.
    """

    def __init__(self, hardware: Hardware, placement: Placement, times: float = 1.0) -> None:
        self.hardware, self.placement, self._times = hardware, placement, times
        #: times by the id of a trace; the entry keeps the trace alive, so that no other gets its id
        self._played: dict[int, tuple[Trace, Played]] = {}
        self._seconds: dict[Event, float] = {}

    def play(self, trace: Trace) -> Played:
        """Return the times of a trace."""
        if id(trace) not in self._played:
            played = Played()
            recomputing = self._run(trace.repeated, played)
            played.repeated = recomputing - played.exposed
            played.seconds = recomputing + self._run(trace.events, played)
            self._played[id(trace)] = trace, played
        return self._played[id(trace)][1]

    def collective(self, operation: str, axes: str, input_bytes: float) -> AxisCost:
        """Return the cost of one collective, all of it exposed."""
        names = tuple(axes.split("x"))
        seconds = self.placement.seconds(self.hardware, operation, names, input_bytes)
        return AxisCost(bytes_sent(operation, self.placement.of(names).ranks, input_bytes), seconds, seconds)

    def _run(self, events: Sequence[Event], played: Played) -> float:
        """Return the seconds of events, and add the cost of their collectives to ``played``.

        A CPU starts an operator and then does its work. The host of a GPU queues operators and does not wait for them
        or for collectives: an operator runs after the one before it, and not before it is queued.
        """
        hardware = self.hardware
        now = free = queued = 0.0
        ends: dict[int, tuple[float, float, str]] = {}
        for event in events:
            if isinstance(event, Started):
                cost = self.collective(event.operation, event.axes, self._times * event.input_bytes)
                if not hardware.overlaps:
                    now += cost.seconds
                    played.axes[event.axes] += cost
                    continue
                free = max(free, now) + cost.seconds
                ends[event.number] = free, cost.seconds, event.axes
                played.axes[event.axes] += AxisCost(cost.bytes, cost.seconds)
            elif isinstance(event, Awaited):
                if event.number in ends:
                    end, seconds, axes = ends.pop(event.number)
                    exposed = max(0.0, end - now)
                    played.axes[axes] += AxisCost(exposed=exposed)
                    now += exposed + hardware.occupied * max(0.0, seconds - exposed)
            else:
                seconds = self._times * self.work(event)
                if isinstance(event, Accumulation):
                    played.accumulating += seconds
                if hardware.overlaps:
                    now = max(now, queued) + seconds
                    queued += hardware.operator_seconds
                else:
                    now += hardware.operator_seconds + seconds
        return now

    def work(self, event: Event) -> float:
        """Return the seconds of an operator's own work, for as many samples as were recorded."""
        if event not in self._seconds:
            self._seconds[event] = self._work_of(event)
        return self._seconds[event]

    def _work_of(self, event: Event) -> float:
        hardware = self.hardware
        if isinstance(event, Operator):
            return hardware.memory_seconds(event.bytes, event.name) if event.bytes else 0.0
        if isinstance(event, Product):
            m, n, k = (max(1, round(size)) for size in (event.m, event.n, event.k))
            return hardware.products_seconds(event.count, m, n, k, event.dtype)
        assert isinstance(event, AttentionCall)
        length = (event.queries * event.keys) ** 0.5
        seconds = hardware.attention_seconds(
            max(1, round(event.heads)), round(length), round(event.head_dim), event.dtype, backward=event.backward
        )
        return seconds if event.causal else 2.0 * seconds


def update_seconds(hardware: Hardware, stored: StoredBytes, parameters: float) -> float:
    """Return the seconds of the gradient norm and the optimizer's step.

    State, weights and gradients are read and written through memory, gradients twice: for the norm, and for the update.
    Weights have as many bytes as gradients. Each parameter starts `_UPDATE_OPERATORS` operators.

    Args:
        hardware: speed of the device.
        stored: bytes that the rank stores.
        parameters: number of its parameters.
    """
    moved = 2.0 * (stored.optimizer + 3.0 * stored.gradients)
    return hardware.memory_seconds(moved) + hardware.eager_seconds(0.0, round(_UPDATE_OPERATORS * parameters))


def total(costs: Sequence[Mapping[str, AxisCost]]) -> dict[str, AxisCost]:
    """Sum costs by axes, over parts of a step that follow each other."""
    out: defaultdict[str, AxisCost] = defaultdict(AxisCost)
    for part in costs:
        for axes, cost in part.items():
            out[axes] += cost
    return out
