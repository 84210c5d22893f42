"""What links hand to NCCL, noted and played as NCCL would run it: whether ranks wait for each other for ever.

What is known of NCCL and of torch's `ProcessGroupNCCL`, and is played here:

* A send or receive runs on the GPU and holds its stream until the other end runs, too. Messages between two ranks are
  matched in the order in which they run; there are no tags. (NCCL's user guide, "Point-to-point communication". A small
  message may be buffered there; here none is, which is the harder case.)
* One send or receive goes to a communicator of its two ranks, with a stream of its own, both directions alike: they run
  in the order of the calls, and the first call makes the communicator, in which the host waits for the other rank.
* Those of a batch run together, on the communicator and the stream of the whole group. So do single ones, too, when the
  process group was made with a ``device_id`` (`Rules.one_communicator`).
* ``Work.wait`` lets the current stream wait, not the host. What is handed over runs after all that the current stream
  had to do before.
* A GPU has few queues: work that cannot start yet may hold up all that was handed over later, on any stream
  (`Rules.one_queue`, CUDA_DEVICE_MAX_CONNECTIONS=1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

from colossus.comm import links as links_module
from colossus.comm.links import Links

#: a message: ("send" or "receive", rank at the other end, what it is)
Message = tuple[str, int, object]


@dataclass(frozen=True)
class Rules:
    """What depends on how torch and the GPU are set up."""

    one_communicator: bool = False
    one_queue: bool = False


ALL_RULES = [Rules(one, queue) for one in (False, True) for queue in (False, True)]


class Stuck(AssertionError):
    """Ranks wait for each other for ever, or take a message for another one."""


@dataclass(eq=False)
class Work:
    """Something that a rank's stream does: compute, or messages that run together.

    Attributes:
        after: what has to be over before it starts, beside what is before it on its stream.
    """

    name: str
    stream: object
    messages: Sequence[Message] = ()
    is_batch: bool = False
    after: Sequence[Work] = ()
    is_started: bool = False
    is_done: bool = False


@dataclass
class Trace:
    """What one rank does, in the order in which its host does it.

    Attributes:
        steps: work that is handed to the GPU, or ("host", work): the host waits until it is over.
    """

    rank: int
    steps: list[Any] = field(default_factory=list)
    _awaited: list[Work] = field(default_factory=list)
    _last: Work | None = None

    def compute(self, name: str) -> None:
        """Something on the current stream; after whatever it has been told to wait for."""
        self._last = Work(name, "compute", after=tuple(self._awaited))
        self._awaited = []
        self.steps.append(self._last)

    def start(self, name: str, *messages: Message, is_batch: bool = False) -> Work:
        """Messages, after what the current stream had to do before."""
        self.compute(f"before {name}")
        assert self._last is not None
        work = Work(name, None, messages, is_batch, after=(self._last,))
        self.steps.append(work)
        return work

    def wait(self, work: Work) -> None:
        """The current stream waits."""
        self._awaited.append(work)

    def wait_on_host(self, work: Work) -> None:
        self.steps.append(("host", work))


def play(traces: Sequence[Trace], rules: Rules) -> None:
    """Run what the ranks have handed over.

    Raises:
        Stuck: with what each rank waits for, or naming a message that is taken for another.
    """
    _Player(traces, rules).play()


class _Player:
    def __init__(self, traces: Sequence[Trace], rules: Rules) -> None:
        self.traces, self.rules = traces, rules
        self.at = [0] * len(traces)
        self.handed: list[list[Work]] = [[] for _ in traces]
        #: communicator -> ranks that have come to it
        self.joined: dict[object, set[int]] = {}
        self.ranks = frozenset(trace.rank for trace in traces)
        #: (communicator, source, to) -> messages that run at either end, as (work, what)
        self.running: dict[tuple[object, int, int], tuple[list[Any], list[Any]]] = {}
        self.missing: dict[int, int] = {}

    def play(self) -> None:
        while self._advance_hosts() | self._advance_gpus():
            pass
        stuck = [self._describe(index) for index in range(len(self.traces)) if not self._is_through(index)]
        if stuck:
            raise Stuck("\n".join(stuck))

    # -- hosts --------------------------------------------------------------------------------------------------

    def _advance_hosts(self) -> bool:
        moved = False
        for index, trace in enumerate(self.traces):
            while self.at[index] < len(trace.steps) and self._host_step(index, trace.steps[self.at[index]]):
                self.at[index] += 1
                moved = True
        return moved

    def _host_step(self, index: int, step: Any) -> bool:
        if isinstance(step, tuple):
            return bool(step[1].is_done)
        if step.messages:
            step.stream = communicator = self._communicator(self.traces[index].rank, step)
            joined = self.joined.setdefault(communicator, set())
            joined.add(self.traces[index].rank)
            members = self.ranks if communicator == "group" else communicator
            if joined < members:  # type: ignore[operator]
                return False
        self.handed[index].append(step)
        return True

    def _communicator(self, rank: int, work: Work) -> object:
        if work.is_batch or self.rules.one_communicator:
            return "group"
        ((_, peer, _),) = work.messages
        return frozenset((rank, peer))

    # -- GPUs ---------------------------------------------------------------------------------------------------

    def _advance_gpus(self) -> bool:
        moved = False
        for index, handed in enumerate(self.handed):
            busy = set()
            for work in handed:
                if not work.is_started:
                    if work.stream in busy or not all(other.is_done for other in work.after):
                        if self.rules.one_queue:
                            break
                    else:
                        self._start(self.traces[index].rank, work)
                        moved = True
                if not work.is_done:
                    busy.add(work.stream)
            self.handed[index] = [work for work in handed if not work.is_done]
        return moved

    def _start(self, rank: int, work: Work) -> None:
        work.is_started = True
        self.missing[id(work)] = len(work.messages)
        work.is_done = not work.messages
        for direction, peer, what in work.messages:
            is_send = direction == "send"
            ends = (rank, peer) if is_send else (peer, rank)
            mine, others = self.running.setdefault((work.stream, *ends), ([], []))[:: 1 if is_send else -1]
            if not others:
                mine.append((work, what))
                continue
            other, wanted = others.pop(0)
            if what != wanted:
                raise Stuck(f"between ranks {ends[0]} and {ends[1]}: {what!r} meets {wanted!r}")
            for one in (work, other):
                self.missing[id(one)] -= 1
                one.is_done = self.missing[id(one)] == 0

    # -- what is left -------------------------------------------------------------------------------------------

    def _is_through(self, index: int) -> bool:
        return self.at[index] == len(self.traces[index].steps) and not self.handed[index]

    def _describe(self, index: int) -> str:
        trace, left = self.traces[index], [work.name for work in self.handed[index] if work.messages]
        step = trace.steps[self.at[index]] if self.at[index] < len(trace.steps) else None
        host = "is through" if step is None else f"waits at {getattr(step, 'name', step)}"
        return f"rank {trace.rank}: the host {host}; on the GPU: {', '.join(left[:3]) or 'nothing'}"


# -- links that note what they would hand to torch.distributed --------------------------------------------------------


@dataclass
class NotedWork:
    """What torch gives for a message that is under way."""

    trace: Trace
    work: Work

    def wait(self) -> None:
        self.trace.wait(self.work)


class NotedDistributed:
    """The functions of torch.distributed that send and receive: noted in the trace of the rank at work."""

    def __init__(self) -> None:
        self.trace = Trace(0)
        self.label = ""

    def isend(self, tensor: Tensor, to: int, group: Any) -> NotedWork:
        return self._start(("send", to, (self.label, tuple(tensor.shape))))

    def irecv(self, tensor: Tensor, source: int, group: Any) -> NotedWork:
        return self._start(("receive", source, (self.label, tuple(tensor.shape))))

    def P2POp(self, function: Any, tensor: Tensor, peer: int, group: Any) -> Any:
        direction = "send" if function == self.isend else "receive"
        return direction, peer, (self.label, tuple(tensor.shape))

    def batch_isend_irecv(self, messages: Sequence[Any]) -> list[NotedWork]:
        return [NotedWork(self.trace, self.trace.start(f"batch of {self.label}", *messages, is_batch=True))]

    def _start(self, message: Any) -> NotedWork:
        return NotedWork(self.trace, self.trace.start(f"{message[0]} of {self.label}", message))


class NotedLinks(Links):
    """Links of an accelerator; an object is two messages, and the host reads the first."""

    noted: NotedDistributed
    #: what arrives for an object
    described: Any = None

    def send(self, to: int, tensors: Sequence[Tensor], label: str, key: object = None) -> Any:
        self.noted.label = label
        return super().send(to, tensors, label, key)

    def receive(self, source: int, expected: Any, label: str, key: object = None) -> Any:
        self.noted.label = label
        return super().receive(source, expected, label, key)

    def exchange(self, to: int, source: int, tensors: Sequence[Tensor], label: str) -> Any:
        self.noted.label = label
        return super().exchange(to, source, tensors, label)

    def send_object(self, to: int, value: Any, label: str) -> None:
        self.noted.label = label
        for part in ("size", "data"):
            self.noted._start(("send", to, (label, part))).wait()

    def receive_object(self, source: int, label: str) -> Any:
        self.noted.label = label
        for part in ("size", "data"):
            work = self.noted._start(("receive", source, (label, part)))
            self.noted.trace.wait_on_host(work.work)
        return self.described


@contextmanager
def noted(described: Any = None) -> Iterator[NotedDistributed]:
    """What goes between ranks is noted in the trace of the one that is set, until this ends."""
    distributed = NotedLinks.noted = NotedDistributed()
    NotedLinks.described = described
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links_module, "dist", distributed)
        yield distributed
