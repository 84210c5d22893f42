"""The thread of a passive replica that answers requests for averages while the replica computes (1710.06952)."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

from colossus.comm.peers import Message, PeerLinks
from colossus.data_parallel.parameter_vector import ParameterVector

#: kinds of messages: x of an active replica, and what it is to subtract
REQUEST, ANSWER = 0x0101, 0x0102


class PairAnswers:
    """Answers with half the difference to what this replica had at its last boundary and has promised since, one
    request after the other.

    Nothing is answered from a sync point of all replicas until the next step begins: parameters may be changed there.

    Args:
        vector: this rank's parameters; read and written by `pass_boundary` alone.
        note: told what is done in which order: ("answer", active replica, number of its exchange), ("boundary",).
    """

    def __init__(self, links: PeerLinks, vector: ParameterVector, note: Callable[..., None]) -> None:
        self._links, self._vector, self._note = links, vector, note
        is_pinned = vector.device.type == "cuda"
        self._now = torch.empty(vector.nbytes, dtype=torch.uint8, pin_memory=is_pinned)
        self._promised = torch.zeros(vector.nbytes, dtype=torch.uint8, pin_memory=is_pinned)
        self._num_promised = 0
        self._requests: deque[Message] = deque()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_open = self._closing = False
        self._failure: BaseException | None = None
        links.on_arrival = self._wake.set
        self._thread = threading.Thread(target=self._run, name="colossus-pairs", daemon=True)
        self._thread.start()

    # -- for the main thread ------------------------------------------------------------------------------

    @torch.no_grad()
    def pass_boundary(self) -> int:
        """Add what was promised to the parameters, and answer from them from now on.

        Returns:
            How many exchanges are applied so.
        """
        with self._lock:
            if self._failure is not None:
                raise RuntimeError(f"the thread that answers other replicas failed: {self._failure}") from self._failure
            applied, self._num_promised = self._num_promised, 0
            if applied:
                self._vector.add(self._promised)
                self._promised.zero_()
            self._vector.pack(self._now)
            self._note("boundary")
        return applied

    def open(self) -> None:
        """A step begins: the parameters are what they will be in it."""
        if not self._is_open:
            with self._lock:
                self._vector.pack(self._now)
                self._is_open = True
            self._wake.set()

    def shut(self) -> None:
        """All replicas have met: nothing is under way, and parameters may change until the next step."""
        with self._lock:
            assert not self._requests, "an average is under way where all have met"
            self._is_open = False

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
                while self._answer_next():
                    pass
        except BaseException as error:  # told by the main thread
            with self._lock:
                self._failure = error

    @torch.no_grad()
    def _answer_next(self) -> bool:
        with self._lock:
            self._requests.extend(self._links.take(REQUEST))
            if not self._is_open or not self._requests:
                return False
            request = self._requests.popleft()
            self._note("answer", request.source, request.number)
            parts = (self._vector.parts(buffer) for buffer in (request.data, self._now, self._promised))
            for given, now, promised in zip(*parts, strict=True):
                given.sub_(now).mul_(0.5)
                now.add_(given)
                promised.add_(given)
            self._num_promised += 1
        dtype = self._vector.dtype
        self._links.send(request.source, ANSWER, request.number, request.data, dtype=dtype, owned=True)
        return True
