"""The thread of a passive replica that answers requests for averages while the replica computes."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable

import torch

from colossus.comm.peers import Message, PeerLinks
from colossus.data_parallel.gossip.pair_protocol import Order, PassiveSide
from colossus.data_parallel.parameter_vector import ParameterVector

#: kinds of messages: x of an active replica, what it is to subtract, and the word of a leader to its followers
REQUEST, ANSWER, ORDER = 0x0101, 0x0102, 0x0103
_ORDER = struct.Struct("<qqq")


class PairAnswers:
    """Answers with half the difference to what this replica had at its last boundary and has promised since.

    Args:
        links: to the same rank of other replicas.
        followers: to the other ranks of this replica; None where there are none.
        vector: this rank's parameters; read and written by `pass_boundary` alone.
        note: told what is done in which order, on the leader: ("answer", active replica, number of its exchange) by the
            thread, ("boundary",) otherwise.

    Attributes:
        side: what was answered so far.
    """

    def __init__(
        self,
        links: PeerLinks,
        followers: PeerLinks | None,
        vector: ParameterVector,
        note: Callable[..., None] = lambda *what: None,
    ) -> None:
        self._links, self._followers, self._vector, self._note = links, followers, vector, note
        self._is_leader = followers is None or followers.group.index == 0
        self.side: PassiveSide[Message] = PassiveSide(self._is_leader)
        is_pinned = vector.device.type == "cuda"
        self._now = torch.empty(vector.nbytes, dtype=torch.uint8, pin_memory=is_pinned)
        self._promised = torch.zeros(vector.nbytes, dtype=torch.uint8, pin_memory=is_pinned)
        self._num_promised = 0
        self._changed = threading.Condition()
        self._wake = threading.Event()
        self._closing = False
        self._failure: BaseException | None = None
        for each in (links, followers):
            if each is not None:
                each.on_arrival = self._wake.set
        self._thread = threading.Thread(target=self._run, name="colossus-pairs", daemon=True)
        self._thread.start()

    # -- for the main thread ------------------------------------------------------------------------------

    @torch.no_grad()
    def pass_boundary(self, num_answered: int | None = None, timeout: float = 0.0) -> tuple[int, int]:
        """Add what was promised to the parameters, and answer from them from now on.

        Args:
            num_answered: by the leader when it was here, for which a follower waits.
            timeout: of that, in seconds.

        Returns:
            How many exchanges were answered so far, and how many of them are applied now.
        """
        with self._changed:
            while num_answered is not None and not self.side.may_pass(num_answered) and self._failure is None:
                if not self._changed.wait(timeout):
                    raise RuntimeError(
                        f"timeout: {num_answered - self.side.num_answered} messages for averages that the first rank "
                        f"of this replica has got did not come to this one within {timeout:g} s"
                    )
            if self._failure is not None:
                raise RuntimeError(f"the thread that answers other replicas failed: {self._failure}") from self._failure
            applied, self._num_promised = self._num_promised, 0
            if applied:
                self._vector.add(self._promised)
                self._promised.zero_()
            self._vector.pack(self._now)
            self.side.pass_boundary()
            count = self.side.num_answered
            if self._is_leader:
                self._note("boundary")
        self._wake.set()
        return count, applied

    def open(self) -> None:
        """A step begins: the parameters are what they will be in it."""
        if not self.side.is_open:
            with self._changed:
                self._vector.pack(self._now)
                self.side.is_open = True
            self._wake.set()

    def shut(self) -> None:
        """All replicas have met: nothing is under way, and parameters may change until the next step."""
        with self._changed:
            assert self.side.is_idle, "an average is under way where all have met"
            self.side.is_open = False

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        self._thread.join()

    # -- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._wake.wait()
                self._wake.clear()
                self._take()
                while self._answer_next():
                    self._take()
        except BaseException as error:  # told by the main thread
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _take(self) -> None:
        for message in self._links.take(REQUEST):
            self.side.came(message.source, message.number, message)
        if self._followers is not None and not self._is_leader:
            for message in self._followers.take(ORDER):
                self.side.ordered(Order(*_ORDER.unpack(message.meta)))

    @torch.no_grad()
    def _answer_next(self) -> bool:
        with self._changed:
            found = self.side.answer_next()
            if found is None:
                return False
            order, request = found
            if self._is_leader:
                self._note("answer", order.active, order.number)
            parts = (self._vector.parts(buffer) for buffer in (request.data, self._now, self._promised))
            for given, now, promised in zip(*parts, strict=True):
                given.sub_(now).mul_(0.5)
                now.add_(given)
                promised.add_(given)
            self._num_promised += 1
            self._changed.notify_all()
        if self._followers is not None and self._is_leader:
            others = [index for index in range(self._followers.group.size) if index]
            meta = _ORDER.pack(order.boundary, order.active, order.number)
            self._followers.send(others, ORDER, 0, meta=meta)
        dtype = self._vector.dtype
        self._links.send(order.active, ANSWER, order.number, request.data, request.meta, dtype=dtype, owned=True)
        return True
