"""The record of what a device is given in a step of the real engine, and its play on devices with streams.

The play follows the rules of CUDA and NCCL.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

import colossus
from colossus.comm import log
from colossus.hardware.hardware import Hardware
from colossus.hardware.host_placement import Placement
from colossus.planner.fake_tensors import CountedFakeTensors
from colossus.planner.trace import AttentionCall, Awaited, Operator, Product, Started
from colossus.planner.trace_recorder import AwaitedEntry, work_of
from colossus.planner.trace_seconds import TracePlayer

#: operator of c10d, or of its functional form -> collective, and the position of its input
_COLLECTIVES = {
    "allreduce_": ("all_reduce", 0), "_allgather_base_": ("all_gather", 1), "alltoall_base_": ("all_to_all", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1), "broadcast_": ("broadcast", 0),
    "send": ("send", 0), "recv_": ("receive", 0),
    "all_reduce": ("all_reduce", 0), "all_gather_into_tensor": ("all_gather", 0),
    "reduce_scatter_tensor": ("reduce_scatter", 0), "all_to_all_single": ("all_to_all", 0),
}  # fmt: skip
_PACKAGE = f"{Path(colossus.__file__).parent}/"
#: files that wait for their callers
_COMMON = tuple(f"{_PACKAGE}{path}" for path in ("comm/", "planner/", "tensor_parallel/move_plan.py"))


@dataclass(frozen=True, slots=True)
class Call(Started):
    """The start of a collective or of a message on a communicator.

    Attributes:
        communicator: name of the process group and the ranks of the world; of a message its two ranks.
    """

    communicator: tuple[str, tuple[int, ...]]

    @property
    def is_message(self) -> bool:
        return self.operation in ("send", "receive")


@dataclass(frozen=True, slots=True)
class Read:
    """A wait of the host for what the current stream has been given.

    Attributes:
        site: line that reads.
        num_events: number of events of the step before the copy that is waited for; None: all.
    """

    site: str
    num_events: int | None = None


DeviceEvent = Product | AttentionCall | Operator | Call | Awaited | Read


class DeviceRecord:
    """The events of a step in the order in which the host issues them.

    All kernels are on one stream: the engine has no other.
    """

    def __init__(self) -> None:
        self.events: list[DeviceEvent] = []
        self._numbers = 0
        self._axes = ""

    @contextmanager
    def recording(self, fake: CountedFakeTensors) -> Iterator[None]:
        """Record what runs under the fake mode inside the context."""
        fake.observer = self._observe
        _running.append(self)
        try:
            with patch.object(log, "record", self._log):
                yield
        finally:
            _running.remove(self)
            fake.observer = None

    def _observe(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func._schema.name.partition("::")[2]
        if func.namespace in ("c10d", "_c10d_functional"):
            if name in _COLLECTIVES:
                self._call(name, args)
            return
        work = work_of(func, args, kwargs, out)
        if work is not None:
            self.events.append(work)  # type: ignore[arg-type]

    def _call(self, name: str, args: Any) -> None:
        operation, position = _COLLECTIVES[name]
        boxed = next((x for x in args if isinstance(x, torch.ScriptObject)), None)
        group = _resolve_process_group(args[-1]) if boxed is None else dist.ProcessGroup.unbox(boxed)
        ranks = tuple(dist.get_process_group_ranks(group))
        if name in ("send", "recv_"):
            ranks = tuple(sorted((dist.get_rank(), ranks[args[2]])))
        tensors = args[position] if isinstance(args[position], list | tuple) else [args[position]]
        size = float(sum(x.nbytes for x in tensors if isinstance(x, Tensor)))
        self.events.append(Call(self._numbers, operation, self._axes, size, (group.group_desc, ranks)))

    def _log(self, operation: str, axes: str, shape: tuple[int, ...], dtype: object) -> log.Entry:
        """Return the entry of a collective, in place of `colossus.comm.log.record`; the entry records the wait."""
        self._numbers += 1
        number, self._axes = self._numbers, axes
        return AwaitedEntry(number, operation, axes, lambda: self.events.append(Awaited(number, _site())))


#: the record that is being made
_running: list[DeviceRecord] = []


def num_events() -> int:
    """Return the number of events that have been recorded."""
    return sum(len(record.events) for record in _running)


def note_read(num_before: int | None = None) -> None:
    """Record that the host reads what a device has computed after this number of events, or after all of them."""
    for record in _running:
        record.events.append(Read(_site(), num_before))


def _site() -> str:
    """Return file and line of the innermost frame of the package outside of `_COMMON`."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE) and not file.startswith(_COMMON):
            return f"{file.removeprefix(_PACKAGE)}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside of the package"


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
                if isinstance(event, Awaited):
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
