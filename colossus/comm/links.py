"""Point-to-point messages between the ranks of one axis: lists of tensors whose shapes the receiver knows.

Messages of CPU tensors between processes of one host go through shared memory, others through c10d. Under gloo,
tensors of an accelerator are copied to the host first (`host_staging`).
"""

from __future__ import annotations

import pickle
import select
import time
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from colossus.comm import accounting, host_staging, log
from colossus.comm.flat_buffer import FlatBuffer
from colossus.comm.mailbox import Receiver, Sender
from colossus.comm.peer_gone import PeerGone
from colossus.comm.shared_memory import map_segments
from colossus.comm.step_regions import over, timed
from colossus.context.groups import AxisGroup

_BUFFER_BYTES = 16 << 20

Wait = Callable[[], None]


class TensorMeta(Protocol):
    """The shape and dtype of a tensor that is to be received."""

    @property
    def shape(self) -> torch.Size: ...
    @property
    def dtype(self) -> torch.dtype: ...


class Incoming:
    """A message that this rank receives; ``wait()`` returns its tensors."""

    def __init__(
        self, tensors: list[Tensor], label: str, tag: int, entry: log.Entry, device: torch.device | None = None
    ) -> None:
        self.tensors, self.label, self.tag, self.entry = tensors, label, tag, entry
        self.finish: Wait | None = None
        self._device = device

    @timed(lambda message: (f"wait for the {message.label}", over(message.entry.axes)))
    def wait(self) -> list[Tensor]:
        if self.finish is not None:
            self.finish()
            self.finish = None
        if self._device is not None:
            self.tensors = [host_staging.to_device(tensor, self._device) for tensor in self.tensors]
            self._device = None
        self.entry.done = True
        return self.tensors


class Links:
    """The links of this rank to others of its group.

    All ranks of the group must make their links at the same time.

    Args:
        group: the ranks of an axis; a rank is named by its index in it.
        pairs: (sender, receiver) of every direction that is used, the same on all ranks.
        device: the device of the tensors.

    Attributes:
        takes_early: whether it is safe and useful to post receives long before they are needed. It is not under NCCL,
            where sends and receives of two ranks run one after the other, in the order of their calls.
        has_batches: whether messages that are to run at once must be started together, by `exchange`.
    """

    def __init__(self, group: AxisGroup, pairs: Sequence[tuple[int, int]], device: torch.device) -> None:
        self._group = group
        #: the device of the tensors, the device from which they travel, and whether the two differ
        self._device, self._wire = device, host_staging.wire_device(device, group)
        self._is_staged = self._wire != device
        self._senders: dict[int, Sender] = {}
        self._receivers: dict[int, Receiver] = {}
        self._posted: dict[int, deque[Incoming]] = {}
        pairs = sorted(set(pairs))
        mapped = map_segments(group, len(pairs), _BUFFER_BYTES, pairs) if self._wire.type == "cpu" and pairs else None
        self.takes_early = mapped is None and self._wire.type == "cpu"
        self.has_batches = self._wire.type != "cpu"
        self._timeout = mapped.timeout if mapped is not None else None
        if mapped is None:
            return
        me = group.index
        for number, (source, to) in enumerate(pairs):
            if source == me:
                self._senders[to] = Sender(mapped.segment(number), mapped.outgoing[to], self._name(to))
            elif to == me:
                self._receivers[source] = Receiver(mapped.segment(number), mapped.incoming[source], self._name(source))
                self._posted[source] = deque()

    @timed(lambda links, to, tensors, label, key=None: (f"send of the {label}", over(str(links._group))), starts=True)
    def send(self, to: int, tensors: Sequence[Tensor], label: str, key: object = None) -> Wait:
        """Start to send tensors to a rank.

        Args:
            to: index of the receiver.
            tensors: the message, of the shapes and dtypes that the receiver expects.
            label: the message's name in the log and in errors, the same at both ends.
            key: a value that sender and receiver must agree on; compared where messages have a header.

        Returns:
            A function that waits until the tensors may be changed.
        """
        entry = self._record_send(tensors, label)
        if self._is_staged:
            tensors = host_staging.all_to_host(tensors)
        sender = self._senders.get(to)
        if sender is not None and FlatBuffer.of(tensors).nbytes <= sender.capacity:
            sender.send(tensors, label, _tag(label, key), self._until_readable)
            entry.done = True
            return lambda: None  # the tensors have been copied
        dense = [_dense(tensor) for tensor in tensors]
        works = [dist.isend(tensor, self._group.ranks[to], self._group.process_group) for tensor in dense]

        def wait() -> None:
            for work in works:
                _wait(work, f"{self._name(to)} did not take the {label}")
            dense.clear()
            entry.done = True

        return wait

    def receive(self, source: int, expected: Sequence[TensorMeta], label: str, key: object = None) -> Incoming:
        """Start to receive tensors of these shapes and dtypes. Messages of one source are received in order."""
        device = self._device if self._is_staged else None
        if device is not None:
            tensors = [host_staging.empty(item.shape, item.dtype, device) for item in expected]
        else:
            tensors = [torch.empty(item.shape, dtype=item.dtype, device=self._device) for item in expected]
        incoming = Incoming(tensors, label, _tag(label, key), self._record("receive", tensors, label), device)
        receiver = self._receivers.get(source)
        if receiver is not None and FlatBuffer.of(tensors).nbytes <= receiver.capacity:
            self._posted[source].append(incoming)
            incoming.finish = lambda: self._receive_up_to(source, incoming)
            return incoming
        group = self._group
        works = [dist.irecv(tensor, group.ranks[source], group.process_group) for tensor in tensors]

        def finish() -> None:
            for work in works:
                _wait(work, f"{self._name(source)} did not send the {label}")

        incoming.finish = finish
        return incoming

    @timed(lambda links, to, source, tensors, label: (f"exchange of the {label}", over(str(links._group))), starts=True)
    def exchange(self, to: int, source: int, tensors: Sequence[Tensor], label: str) -> Callable[[], list[Tensor]]:
        """Start to send to one rank and to receive tensors of the same shapes from another, all at once.

        Under NCCL this is one launch on the communicator of the group, so all of its ranks have to call.

        Returns:
            A function that waits for both and returns the received tensors.
        """
        group = self._group
        entry = self._record_send(tensors, label)
        dense = [_dense(tensor) for tensor in tensors]
        received = [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in dense]
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, tensor, group.ranks[to], group.process_group) for tensor in dense]
            + [dist.P2POp(dist.irecv, tensor, group.ranks[source], group.process_group) for tensor in received]
        )

        def wait() -> list[Tensor]:
            for work in works:
                _wait(work, f"{self._name(to)} and {self._name(source)} did not exchange the {label}")
            dense.clear()
            entry.done = True
            return received

        return wait

    def send_object(self, to: int, value: Any, label: str) -> None:
        """Send an object of at most a few KB; accounting does not count it."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        with accounting.paused():
            for tensor in (torch.tensor([len(data)]), data):
                self.send(to, [tensor.to(self._device)], label)()

    def receive_object(self, source: int, label: str) -> Any:
        """Receive an object from a rank of this run, which must be trusted, since unpickling runs code."""
        (size,) = self.receive(source, [torch.empty(1, dtype=torch.int64)], label).wait()
        (data,) = self.receive(source, [torch.empty(int(size), dtype=torch.uint8)], label).wait()
        with warnings.catch_warnings():  # torch's own LeafSpec warns of itself when it is unpickled
            warnings.simplefilter("ignore", FutureWarning)
            return pickle.loads(bytes(data.cpu().numpy()))

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()
        for receiver in self._receivers.values():
            receiver.close()
        self._senders.clear()
        self._receivers.clear()

    def _receive_up_to(self, source: int, wanted: Incoming) -> None:
        """Read the messages of a source up to ``wanted``, and meanwhile those that come from other ranks."""
        receiver = self._receivers[source]
        while wanted.finish is not None:
            if len(self._receivers) > 1 and not self._until_readable(receiver.fileno()):
                raise receiver.timeout_error(wanted.label)
            if wanted.finish is not None:
                self._receive_next(source)

    def _receive_next(self, source: int) -> None:
        incoming = self._posted[source].popleft()
        incoming.finish = None
        self._receivers[source].receive(incoming.tensors, incoming.label, incoming.tag)
        incoming.entry.done = True

    def _until_readable(self, descriptor: int) -> bool:
        """Wait until the descriptor is readable, and return whether it is before the timeout.

        Meanwhile receive the messages that arrive: the peer may itself be waiting for room in its buffer.
        """
        assert self._timeout is not None
        deadline = time.monotonic() + self._timeout
        while True:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            sources = {self._receivers[source].fileno(): source for source, posted in self._posted.items() if posted}
            for other in sources:
                poll.register(other, select.POLLIN)
            ready = {other for other, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000)}
            if not ready or descriptor in ready:
                return bool(ready)
            for other in ready:
                self._receive_next(sources[other])

    def _record_send(self, tensors: Sequence[Tensor], label: str) -> log.Entry:
        """Count and log a message that is sent."""
        for counter in accounting.listeners:
            for tensor in tensors:
                counter.add("send", str(self._group), tensor.dtype, tensor.nbytes)
        return self._record("send", tensors, label)

    def _record(self, operation: str, tensors: Sequence[Tensor], label: str) -> log.Entry:
        shape, dtype = (tuple(tensors[0].shape), tensors[0].dtype) if tensors else ((0,), None)
        return log.record(f"{operation} of the {label}", str(self._group), shape, dtype)

    def _name(self, index: int) -> str:
        return f"rank {self._group.ranks[index]}"


def _dense(x: Tensor) -> Tensor:
    return x.resolve_conj().resolve_neg().contiguous()


def _tag(label: str, key: object) -> int:
    return zlib.crc32(f"{label} {key}".encode())


def _wait(work: dist.Work | None, failure: str) -> None:
    assert work is not None
    try:
        work.wait()
    except RuntimeError as error:
        raise PeerGone(f"{failure}: {error}") from error


def rotate(tensors: list[Tensor], group: AxisGroup, description: str, hop: int = 1) -> Callable[[], list[Tensor]]:
    """Start to send tensors to the rank that is ``hop`` ranks on, and to receive those of the rank as far before.

    The first rank follows the last. All ranks send tensors of the same shapes.

    Returns:
        A function that waits for both and returns the received tensors.
    """
    links = ring_of(group, tensors[0].device, hop)
    following, preceding = (group.index + hop) % group.size, (group.index - hop) % group.size
    if links.has_batches:
        return links.exchange(following, preceding, tensors, description)
    # the receive comes first, since a send that waits for room receives the messages that arrive meanwhile
    incoming = links.receive(preceding, tensors, description)
    wait_until_sent = links.send(following, tensors, description)

    def wait() -> list[Tensor]:
        received = incoming.wait()
        wait_until_sent()
        return received

    return wait


class Ring(Links):
    """The links of each rank of a group to the rank that is ``hop`` ranks on, and from the one as far before."""

    def __init__(self, group: AxisGroup, device: torch.device, hop: int = 1) -> None:
        super().__init__(group, [(index, (index + hop) % group.size) for index in range(group.size)], device)


def ring_of(group: AxisGroup, device: torch.device, hop: int = 1) -> Ring:
    """Return the ring of this group. The first call makes it, on all ranks of the group at the same time."""
    return group.opened((Ring, hop), lambda: Ring(group, device, hop))
