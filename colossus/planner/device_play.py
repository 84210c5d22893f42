"""The play of recorded steps on devices with streams, by the rules of CUDA and NCCL. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from colossus.hardware.hardware import Hardware
from colossus.hardware.host_placement import Placement
from colossus.planner.device_record import Call, DeviceEvent, Read, Wait
from colossus.planner.trace_seconds import TracePlayer

#: plays of a step one after the other; the last is the result, as the host is ahead by then
_ROUNDS = 2


@dataclass
class PlayedStep:
    """The seconds of one rank's step.

    Attributes:
        seconds: seconds from the end of one step to the end of the next.
        busy: seconds in which kernels run.
        exposed: axes -> seconds in which the compute stream waits for their collectives with nothing to run.
        sites: (operation, axes, line that waits) -> the same seconds.
        reads: lines of the host's reads of the device.
        stalled: seconds in which the host waits for them.
    """

    seconds: float = 0.0
    busy: float = 0.0
    exposed: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    sites: defaultdict[tuple[str, str, str], float] = field(default_factory=lambda: defaultdict(float))
    reads: list[str] = field(default_factory=list)
    stalled: float = 0.0

    @property
    def exposed_share(self) -> float:
        """Return the part of the step in which the compute stream waits for collectives."""
        return sum(self.exposed.values()) / self.seconds


class _Communicator:
    """The calls on one communicator, which run one after the other; each starts when all played ranks have come to it.

    Attributes:
        came: for each call in order, the times at which ranks have come to it, and its seconds.
        ends: the ends of the calls so far.
    """

    def __init__(self, members: int) -> None:
        self._members = members
        self._came: list[tuple[list[float], float]] = []
        self._ends: list[float] = []
        self._counts: defaultdict[int, int] = defaultdict(int)

    def call(self, rank: int, now: float, seconds: float) -> int:
        """Return the index of a rank's next call, to which it comes at ``now``."""
        index = self._counts[rank]
        self._counts[rank] += 1
        if index == len(self._came):
            self._came.append(([], seconds))
        self._came[index][0].append(now)
        return index

    def end(self, index: int) -> float | None:
        """Return when a call ends, None while some rank has not come to it or to one before."""
        while len(self._ends) <= index:
            came, seconds = self._came[len(self._ends)]
            if len(came) < self._members:
                return None
            self._ends.append(max(*came, self._ends[-1] if self._ends else 0.0) + seconds)
        return self._ends[index]


class DevicePlayer:
    """Plays recorded steps on devices of one kind.

    - The host issues operators one after the other, each in ``operator_seconds``, and runs ahead of its device. A read
      lets it wait for all that the stream has been given.
    - A kernel starts after those before it on the stream, and after the host has issued it.
    - A collective starts after what the stream was given before it, and after the collectives before it on its
      communicator. Two communicators work at once. A wait lets the stream wait, not the host.
    - A message, and a collective of several of the played ranks, starts when all of these have come to it. Ranks that
      are not played come when this one does.

    Args:
        hardware: speed of devices and links.
        placement: ranks on hosts.
    """

    def __init__(self, hardware: Hardware, placement: Placement) -> None:
        self._hardware, self._placement = hardware, placement
        self._work = TracePlayer(hardware, placement)

    def play(self, steps: Mapping[int, Sequence[DeviceEvent]]) -> dict[int, PlayedStep]:
        """Return the times of the steps of some ranks of the world, which run at once."""
        played = {rank: PlayedStep() for rank in steps}
        communicators: dict[tuple[str, tuple[int, ...]], _Communicator] = {}
        runs = {rank: self._run(rank, events, played[rank], communicators, steps) for rank, events in steps.items()}
        places: dict[int, int | None] = dict.fromkeys(runs)
        while places:
            before, places = places, {rank: at for rank in places if (at := next(runs[rank], None)) is not None}
            assert places != before, f"ranks wait for each other: {places}"
        return played

    def _run(
        self,
        rank: int,
        events: Sequence[DeviceEvent],
        played: PlayedStep,
        communicators: dict[tuple[str, tuple[int, ...]], _Communicator],
        ranks: Container[int],
    ) -> Iterator[int]:
        """Play a rank; yield the number of events so far whenever another rank has to come to a call first."""
        host = stream = 0.0
        calls: defaultdict[int, list[tuple[Call, _Communicator, int]]] = defaultdict(list)
        for number in range(_ROUNDS):
            vars(played).update(vars(PlayedStep()))
            began = stream
            ends: list[float] = []
            for index, event in enumerate(events):
                if isinstance(event, Wait):
                    for call, communicator, place in calls.pop(event.number, ()):
                        while (end := communicator.end(place)) is None:
                            yield number * len(events) + index
                        now = max(host, stream)
                        if end > now:
                            played.exposed[call.axes] += end - now
                            played.sites[call.operation, call.axes, event.site] += end - now
                        stream = max(stream, end)
                elif isinstance(event, Read):
                    played.reads.append(event.site)
                    computed = stream if event.num_events is None else ends[event.num_events - 1]
                    played.stalled += max(0.0, computed - host)
                    host = max(host, computed)
                else:
                    host += self._hardware.operator_seconds
                    if isinstance(event, Call):
                        members = sum(member in ranks for member in event.communicator[1])
                        communicator = communicators.setdefault(event.communicator, _Communicator(members))
                        place = communicator.call(rank, max(host, stream), self._seconds(event))
                        calls[event.number].append((event, communicator, place))
                    elif seconds := self._work.work(event):
                        played.busy += seconds
                        stream = max(host, stream) + seconds
                ends.append(stream)
            played.seconds = stream - began

    def _seconds(self, call: Call) -> float:
        ranks = call.communicator[1]
        hosts = len({rank // self._placement.ranks_per_host for rank in ranks})
        operation = {"receive": "send", "broadcast": "all_reduce"}.get(call.operation, call.operation)
        return self._hardware.collective_seconds(operation, len(ranks), call.input_bytes, hosts=hosts)
