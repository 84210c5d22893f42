"""How long a trace takes on a device: it computes, and collectives run beside that until they are waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from colossus.hardware.hardware import Hardware, bytes_sent
from colossus.hardware.host_placement import Placement
from colossus.planner.plan_estimate import AxisCost
from colossus.planner.rank_memory import StoredBytes
from colossus.planner.trace import AttentionCall, Awaited, Event, Operator, Product, Started, Trace

#: of an update, for each parameter
_UPDATE_OPERATORS = 4


@dataclass
class Played:
    """A trace that was played.

    Attributes:
        seconds: from its first event to its last.
        repeated: of these, computing that is done again.
        axes: what its collectives cost, by axes.
    """

    seconds: float = 0.0
    repeated: float = 0.0
    axes: dict[str, AxisCost] = field(default_factory=dict)

    @property
    def exposed(self) -> float:
        return sum(cost.exposed for cost in self.axes.values())

    def add(self, axes: str, cost: AxisCost) -> None:
        self.axes[axes] = self.axes.get(axes, AxisCost()) + cost


class TracePlayer:
    """Plays traces on devices of one kind that are placed on hosts.

    Args:
        times: what is played is of a microbatch of so many times the samples: all its work and bytes are.
    """

    def __init__(self, hardware: Hardware, placement: Placement, times: float = 1.0) -> None:
        self.hardware, self.placement, self._times = hardware, placement, times
        self._known: dict[int, tuple[Trace, Played]] = {}
        self._seconds: dict[Event, float] = {}

    def play(self, trace: Trace) -> Played:
        known = self._known.get(id(trace))
        if known is None:
            played = Played()
            again = self._run(trace.repeated, played)
            played.repeated = again - played.exposed
            played.seconds = again + self._run(trace.events, played)
            known = self._known[id(trace)] = trace, played  # with the trace, whose id is then its own
        return known[1]

    def collective(self, operation: str, axes: str, held: float) -> AxisCost:
        """Of one collective, all of it exposed."""
        names = axes_of(axes)
        seconds = self.placement.seconds(self.hardware, operation, names, held)
        return AxisCost(bytes_sent(operation, self.placement.of(names).ranks, held), seconds, seconds)

    def _run(self, events: Sequence[Event], played: Played) -> float:
        """The seconds of events; what their collectives cost is added to ``played``."""
        hardware = self.hardware
        now = free = work = 0.0
        operators = 0
        ends: dict[int, tuple[float, str]] = {}
        for event in events:
            if not isinstance(event, Started | Awaited):
                work += self._times * self._work(event)
                operators += 1
                continue
            now += hardware.eager_seconds(work, operators)
            work, operators = 0.0, 0
            if isinstance(event, Started):
                cost = self.collective(event.operation, event.axes, self._times * event.held)
                if not hardware.overlaps:
                    now += cost.seconds
                    played.add(event.axes, cost)
                    continue
                free = max(free, now) + cost.seconds
                ends[event.number] = free, event.axes
                played.add(event.axes, AxisCost(cost.bytes, cost.seconds))
            elif event.number in ends:
                end, axes = ends.pop(event.number)
                played.add(axes, AxisCost(exposed=max(0.0, end - now)))
                now = max(now, end)
        return now + hardware.eager_seconds(work, operators)

    def _work(self, event: Event) -> float:
        found = self._seconds.get(event)
        if found is None:
            found = self._seconds[event] = self._work_of(event)
        return found

    def _work_of(self, event: Event) -> float:
        hardware = self.hardware
        if isinstance(event, Operator):
            return hardware.memory_seconds(event.bytes, event.name) if event.bytes else 0.0
        if isinstance(event, Product):
            m, n, k = (max(1, round(size)) for size in (event.m, event.n, event.k))
            return event.count * hardware.matmul_seconds(m, n, k, event.dtype)
        assert isinstance(event, AttentionCall)
        length = (event.queries * event.keys) ** 0.5
        seconds = hardware.attention_seconds(
            max(1, round(event.heads)), round(length), round(event.head_dim), event.dtype, backward=event.backward
        )
        return seconds if event.causal else 2.0 * seconds


def update_seconds(hardware: Hardware, stored: StoredBytes, parameters: float) -> float:
    """Of the norm of the gradients and the optimizer: their bytes, read and written through memory, and so many
    operators for each of the rank's parameters."""
    moved = 2.0 * (stored.optimizer + 2.0 * stored.gradients_between)
    return hardware.memory_seconds(moved) + hardware.eager_seconds(0.0, round(_UPDATE_OPERATORS * parameters))


def axes_of(name: str) -> tuple[str, ...]:
    """The axes of a group by the name under which its bytes are counted."""
    return tuple(name.split("x"))


def total(costs: Sequence[Mapping[str, AxisCost]]) -> dict[str, AxisCost]:
    """By axes, of several parts of a step that follow each other."""
    out: dict[str, AxisCost] = {}
    for each in costs:
        for axes, cost in each.items():
            out[axes] = out.get(axes, AxisCost()) + cost
    return out
