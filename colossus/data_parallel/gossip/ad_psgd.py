"""AD-PSGD (1710.06952): replicas average in pairs while they compute, and no replica waits for a slow one."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from colossus.comm.peers import Message, PeerLinks
from colossus.data_parallel.gossip.gossip import GraphStrategy
from colossus.data_parallel.options.gossip_options import ADPSGDOptions
from colossus.data_parallel.parameter_vector import ParameterVector
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.gradients.reduction import ModelParts
from colossus.graphs.graph_checks import two_sides

#: kinds of messages: x of an active replica, and the difference that it is to subtract
REQUEST, ANSWER = 0x0101, 0x0102


class ADPSGD(GraphStrategy):
    """Pairwise averaging on a bipartite graph, by increments of half a difference.

    Replicas are *active* or *passive*. At the boundary of a step an active one sends its x_i to a passive neighbour.
    The passive one answers at once, also inside a step, with d = (x_i - x_j) / 2, and answers the next request as if
    it had added d already. It adds its promised increments at its next boundary. The active one subtracts d at the
    first boundary after the answer has come. Gradients may be stale.

    An active replica has one exchange under way, so exchanges are averages of two replicas, one after the other, in
    the order of the answers. With k under way it would give away half of itself k times:
    x(t + 1) = x(t) - (x(t - k) - x_j) / 2, which diverges for k > 2.

    Runs are not reproducible: the pairs and their order depend on the speed of the replicas. A replica is one rank.

    Attributes:
        num_exchanges: the number of exchanges that this replica has begun.
        record: None, or a list to which this replica appends its events: ("step", completed) after its own update;
            ("begin", passive, number) and ("apply", passive, number) on an active one; ("answer", active, number) and
            ("boundary",), where it adds its increments, on a passive one.
    """

    options: ADPSGDOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(ADPSGDOptions(**options))
        self.record: list[tuple[Any, ...]] | None = None

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        super().setup(store, parts)
        #: on an active replica: its neighbours, and the weights with which they are picked
        self._neighbours: list[int] = []
        self._weights: list[float] = []
        self._seed, self.num_exchanges = parts.context.rng.seed, 0
        #: the exchange under way: the passive replica, its number, and the steps completed when it began
        self._under_way: tuple[int, int, int] | None = None
        self.answers: PairAnswers | None = None
        #: for each exchange applied in this step, the number of steps since it began
        self._applied: list[int] = []
        if self.links is None:
            return
        self._wait_for_all()  # afterwards all are connected, so that each notices the death of another
        weights = np.sum(self.graph.matrices, axis=0)  # the weight from each replica to each other in a period
        np.fill_diagonal(weights, 0.0)
        sides = two_sides(weights > 0)
        assert sides is not None
        me = self._data_group.index
        if me in sides[0]:
            self._neighbours = [index for index in sides[1] if weights[index, me]]
            self._weights = [float(weights[index, me]) for index in self._neighbours]
        else:
            self.answers = PairAnswers(self.links, self.vector, self._note)

    # -- a step -------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        if self.answers is not None:
            self.answers.open()

    def after_step(self, step: int) -> None:
        if self.links is None:
            return
        self._completed, self._applied = step + 1, []
        self.require_alive()
        self._note("step", self._completed)
        if self.answers is not None:
            self._applied = [1] * self.answers.pass_boundary()
        elif self._under_way is None or self.links.has_come(ANSWER):
            self._apply_answer()
            self._begin_exchange()

    def _begin_exchange(self) -> None:
        """Begin an exchange with a neighbour that depends on the seed, the replica and the exchange's number."""
        assert self.links is not None
        draw = random.Random(f"{self._seed}/{self._data_group.index}/{self.num_exchanges}")
        (passive,) = draw.choices(self._neighbours, self._weights)
        number, self.num_exchanges = self.num_exchanges, self.num_exchanges + 1
        self._under_way = passive, number, self._completed
        self._note("begin", passive, number)
        data = self.links.buffer(self.vector.nbytes)
        self.vector.pack(data)
        self.links.send(passive, REQUEST, number, data, dtype=self.vector.dtype, owned=True)

    def _apply_answer(self) -> None:
        """Wait for the answer that is under way, if any, and subtract it."""
        assert self.links is not None
        if self._under_way is None:
            return
        (passive, number, step), self._under_way = self._under_way, None
        message = self.receive_from(passive, ANSWER, number, lambda: None)
        self.vector.add(message.data, alpha=-1.0)
        self.links.release(message.data)
        self._note("apply", passive, number)
        self._applied.append(self._completed - step)

    def _note(self, *what: Any) -> None:
        if self.record is not None:
            self.record.append(what)

    # -- sync points --------------------------------------------------------------------------------------

    def before_sync_point(self) -> None:
        """Apply the exchange that is under way, and wait until all replicas have: then none is under way."""
        super().before_sync_point()
        self._apply_answer()  # the thread of the passive replica answers wherever its main thread is
        self._wait_for_all()
        if self.answers is not None:
            self._applied += [0] * self.answers.pass_boundary()
            self.answers.shut()

    def _wait_for_all(self) -> None:
        assert self.links is not None
        assert self.stop_agreement is not None
        began = time.monotonic()
        self.stop_agreement.wait_for_all()
        self.links.waited_seconds += time.monotonic() - began

    # -- besides ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"exchanges": self.num_exchanges}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_exchanges = int(state.get("exchanges", 0))

    def report(self) -> dict[str, float]:
        if self.links is None:
            return {}
        count = len(self._applied)
        staleness = {"staleness": sum(self._applied) / count} if count else {}
        return super().report() | {"exchanges": float(count)} | staleness

    def wait_before_close(self) -> None:
        super().wait_before_close()
        if self.answers is not None:
            self.answers.close()


class PairAnswers:
    """The thread of a passive replica that answers requests, one after the other.

    An answer is half the difference to the parameters at the last boundary plus the increments promised since. From a
    sync point to the beginning of the next step nothing is answered, since parameters may change there.

    Args:
        links: the links to the other replicas.
        vector: this rank's parameters, which only `pass_boundary` and `open` read, and only the former writes.
        note: called with each event in order: ("answer", active replica, number of its exchange), ("boundary",).
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
        """Add the promised increments to the parameters, from which later requests are answered.

        Returns:
            The number of exchanges that are applied by this.
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
        """Begin to answer from the parameters of the step that begins, if answers were shut."""
        if not self._is_open:
            with self._lock:
                self._vector.pack(self._now)
                self._is_open = True
            self._wake.set()

    def shut(self) -> None:
        """Stop answering until the next step; all replicas are at a sync point, and no exchange is under way."""
        with self._lock:
            assert not self._requests, "an exchange is under way at a sync point"
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
        except BaseException as error:  # the main thread raises it
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
            for x, now, promised in zip(*parts, strict=True):
                difference = x.sub_(now).mul_(0.5)
                now.add_(difference)
                promised.add_(difference)
            self._num_promised += 1
        dtype = self._vector.dtype
        self._links.send(request.source, ANSWER, request.number, request.data, dtype=dtype, owned=True)
        return True
