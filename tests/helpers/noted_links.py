"""Links that note what they would hand to torch.distributed, instead of doing it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from helpers.nccl import Trace, Work
from torch import Tensor

from colossus.comm import links as links_module
from colossus.comm.links import Links


class NotedWork:
    """What torch gives for a message that is under way."""

    def __init__(self, trace: Trace, work: Work) -> None:
        self.trace, self.work = trace, work

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
