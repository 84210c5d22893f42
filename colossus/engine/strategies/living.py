"""Which replicas live: how those that are left agree, after a death, from which step on they go on without the dead.

The launcher posts a death in its store (`DeathBoard`). Every replica that hears of it, at a step boundary or while it
waits for a peer, answers with the first step of which it has sent nothing yet, and waits until all have answered. The
largest of the answers is the step from which on all of them mix by a graph over the living. In steps before it they use
the old graph: what they send to the dead is lost, and what the dead did not send any more is left out.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from colossus.comm import collectives, ring, shared_memory
from colossus.comm.peers import PeerLinks
from colossus.context.death_board import DEATH_STORE, OPEN, connect
from colossus.context.parallel_context import ParallelContext
from colossus.graphs.graph import Graph, StepGraph
from colossus.graphs.reformed import LivingGraph, reform

log = logging.getLogger("colossus.engine")

#: between two looks whether the launcher has posted a death
_LOOK_SECONDS = 0.1
#: between two looks for what other replicas answer
_ANSWER_SECONDS = 0.005
#: for which a replica whose connection was closed may be waited for to be called dead, or alive
_VERDICT_SECONDS = 45.0
#: for which what the dead had sent may be on its way where no connection of theirs was seen to be closed
_LAST_SECONDS = 0.5


class Living:
    """The replicas of a run, in which nobody dies without ending it.

    Args:
        graph: over all of them.
    """

    def __init__(self, context: ParallelContext, graph: Graph) -> None:
        self._context = context
        #: index of this replica among all, and of those that live
        self.me = context.index("data")
        self.replicas = tuple(range(graph.replicas))
        #: (the first step, the graph): of several the last that has begun
        self._epochs = [(0, LivingGraph(graph, self.replicas, graph.replicas))]

    def graph_at(self, step: int) -> StepGraph:
        """Of a step, over the indices of all replicas."""
        return next(graph for start, graph in reversed(self._epochs) if start <= step).at(step)

    @property
    def size(self) -> int:
        """How many live."""
        return len(self.replicas)

    def number_of(self, replica: int) -> int:
        """Its number among those that live; of one that died, a number that none of these has."""
        if replica in self.replicas:
            return self.replicas.index(replica)
        return self.size + replica

    def settle(self, step: int, messages: Sequence[Any]) -> list[Any]:
        """Before what is due after step ``step`` is taken in, once this replica has sent its own: the messages that
        count, of which those that are due have come or are to be waited for."""
        return list(messages)

    def meet(self, messages: Sequence[Any]) -> list[Any]:
        """All replicas are about to do something together: what `settle` says of all messages in flight."""
        return list(messages)

    def close(self) -> None: ...


class Survivors(Living):
    """The same where the others go on without a replica that dies. All of the methods but `graph_at` are collective
    inside of a replica.

    Args:
        name: of the graph.
        problems: what is wrong with a graph, for this strategy.
        kind: of the messages that are awaited.
        answer: what else this replica tells the others after a death.
        agreed: called with all replicas' answers, the first step without the dead, the graph from then on, and by what
            push-sum weights are multiplied, so that their mean is about 1 again.
        mass: this replica's push-sum weight, with what is in flight to it; called when all of that has come.
    """

    def __init__(
        self,
        context: ParallelContext,
        graph: Graph,
        links: PeerLinks,
        *,
        name: str,
        problems: Callable[[Graph], list[str]],
        kind: int,
        answer: Callable[[], Mapping[str, Any]],
        agreed: Callable[[Mapping[int, Mapping[str, Any]], int, Graph, float], None],
        mass: Callable[[], float],
    ) -> None:
        super().__init__(context, graph)
        address = os.environ.get(DEATH_STORE)
        if address is None:
            raise ValueError(
                "parallel.strategy.on_death = 'continue' needs `colossus launch`, whose launcher goes on when a rank "
                "has died: torchrun and srun end all ranks, and processes that you start yourself nobody looks after"
            )
        if context.device.type != "cpu":
            raise ValueError(
                "parallel.strategy.on_death = 'continue' is for ranks on CPU: NCCL's groups do not outlive the death "
                "of a member; use on_death='stop', or device='cpu'"
            )
        self._graph, self._links, self._name, self._problems, self._kind = graph, links, name, problems, kind
        self._answer, self._agreed, self._mass = answer, agreed, mass
        self._inside = context.group(context.replica_axes)
        self._board = connect(address, context.timeout)
        self._dead: dict[int, float] = {}  # replica -> when it was left out
        self._num_settled = 0
        self._has_begun = False
        #: the first step of which nothing was sent
        self._next_step = 0
        self._num_meetings = 0
        self._untold: list[int] = []
        #: push-sum weight of all when it was last summed up, and by what it was multiplied since
        self._total, self._scale = float(graph.replicas), 1.0
        #: what the thread has seen
        self._num_deaths = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(address,), name="colossus-deaths", daemon=True)
        self._thread.start()

    def graph_at(self, step: int) -> StepGraph:
        """What would go to those that are known to be dead is kept."""
        graph = super().graph_at(step)
        dead = [index for index in self._dead if graph.matrix[index].any()]
        if not dead:
            return graph
        matrix = graph.matrix.copy()
        matrix[range(len(matrix)), range(len(matrix))] += matrix[dead].sum(0)
        matrix[dead] = 0.0
        return StepGraph(matrix)

    # -- in each step -------------------------------------------------------------------------------------

    def settle(self, step: int, messages: Sequence[Any]) -> list[Any]:
        self._next_step = step + 1
        if self._untold and self.size == 1 and all(map(self._is_here, messages)):  # it meets nobody any more
            self._tell_mass(self._mass())
        if not self._has_begun:
            self._has_begun = True
            self._board.begin()
        return self._settle_messages(messages, step)

    def _settle_messages(self, messages: Sequence[Any], last_due: float) -> list[Any]:
        left = list(messages)
        while True:
            self._wait_for([message for message in left if message.due <= last_due])
            of_dead = [message for message in left if message.source in self._dead]
            num_deaths, absent = self._agree_inside(of_dead)
            if num_deaths <= self._num_settled:
                return [message for message in left if message not in absent]
            self._settle_deaths(num_deaths)

    def _wait_for(self, messages: Sequence[Any]) -> None:
        """Until they are here, or cannot come any more, or there is news."""
        began, suspected, links = time.monotonic(), math.inf, self._links
        while self._num_deaths <= self._num_settled:
            missing = [message for message in messages if not self._is_here(message) and not self._is_over(message)]
            if not missing:
                break
            now = time.monotonic()
            lost = next((each for each in missing if links.lost(each.source) and each.source not in self._dead), None)
            suspected = min(suspected, now) if lost is not None else math.inf
            since, most = (
                (began, self._context.timeout.total_seconds()) if lost is None else (suspected, _VERDICT_SECONDS)
            )
            if now - since > most:
                first = lost or missing[0]
                links.receive(first.source, self._kind, first.sent)  # raises what is the matter
                raise RuntimeError(f"timeout: {links.name(first.source)} did not send its message {first.sent}")
            links.wait(_LOOK_SECONDS, partial(self._is_any_here, missing))
        links.waited_seconds += time.monotonic() - began

    def _is_any_here(self, messages: Sequence[Any]) -> bool:
        return any(map(self._is_here, messages))

    def _is_here(self, message: Any) -> bool:
        return message.data is not None or self._links.has(message.source, self._kind, message.sent)

    def _is_over(self, message: Any) -> bool:
        """Whether its sender has died, and nothing of it is on its way."""
        since = self._dead.get(message.source)
        return since is not None and time.monotonic() - since > _LAST_SECONDS

    def _agree_inside(self, messages: Sequence[Any] = ()) -> tuple[int, list[Any]]:
        """How many deaths some rank of this replica knows of, and which of these messages some rank has not."""
        numbers = [self._num_deaths, *(not self._is_here(message) for message in messages)]
        if self._inside.size > 1:
            values = torch.tensor(numbers, dtype=torch.float64)
            numbers = [int(x) for x in collectives.all_reduce(values, self._inside, op="max", owned=True).wait()]
        return numbers[0], [message for message, is_absent in zip(messages, numbers[1:], strict=True) if is_absent]

    # -- a death ------------------------------------------------------------------------------------------

    def _settle_deaths(self, num_deaths: int) -> None:
        while self._num_settled < num_deaths:
            self._settle(self._num_settled + 1)

    def _settle(self, number: int) -> None:
        """Agree with all that live on the first step without those that died."""
        death, board, context = self._board.death(number), self._board, self._context
        if self.me in death.replicas:  # the launcher is about to end this process
            time.sleep(_VERDICT_SECONDS)
        self.replicas = tuple(index for index in self.replicas if index not in death.replicas)
        if self._inside.index == 0:
            board.answer(number, self.me, {"step": self._next_step, **self._answer()})
        answers = self._await(lambda: board.answers(number, self.replicas), "how they go on after a death")
        start = max(answer["step"] for answer in answers)
        graph, why = reform(self._graph, self.size, self._problems)
        self._epochs.append((start, LivingGraph(graph, self.replicas, self._graph.replicas)))
        self._dead |= dict.fromkeys(death.replicas, time.monotonic())
        for index in death.replicas:
            self._links.lose(index, death.reason)
        scale = self.size / sum(answer["weight"] for answer in answers)
        self._agreed(dict(zip(self.replicas, answers, strict=True)), start, graph, scale)
        self._scale *= scale
        dead = {rank for rank in context.ranks if context.grid.index(rank, "data") in death.replicas}
        for group in context.leave_out(dead):
            shared_memory.forget(group)
            ring.forget(group)
        self._num_settled = number
        self._untold.append(number)
        if context.is_logging_rank:
            board.tell("start", number, {"step": start + 1, "graph": why or self._name})
            others = f"the other {self.size} replicas go on" if self.size > 1 else "the last replica goes on"
            log.warning(
                "%s; from step %d on %s without it (graph: %s)", death.reason, start + 1, others, why or self._name
            )
        board.settle(number)

    def _await(self, look: Callable[[], Any], what: str) -> Any:
        began = time.monotonic()
        while (found := look()) is None:
            if time.monotonic() - began > self._context.timeout.total_seconds():
                raise RuntimeError(
                    f"timeout: not all replicas have told {what} within {self._context.timeout.total_seconds():g} s"
                )
            time.sleep(_ANSWER_SECONDS)
        return found

    # -- meetings -----------------------------------------------------------------------------------------

    def meet(self, messages: Sequence[Any]) -> list[Any]:
        """Wait until all that live have come. Who has died before that is left out; nobody begins what others do not.

        From then on to the end of what they do together a death ends the run: collectives are under way.
        """
        self._num_meetings += 1
        attempt = 0
        left = self._settle_messages(messages, float("inf"))
        while (decision := self._gate(f"{self._num_meetings}.{attempt}")) != OPEN:
            self._settle_deaths(int(decision))
            attempt += 1
        return left

    def _gate(self, meeting: str) -> str:
        """`OPEN`, or the number of a death that is to be settled first: the same for all."""
        board = self._board
        if self._inside.index == 0:
            board.arrive(meeting, self.me, {"mass": self._mass()})
        began = time.monotonic()
        while (decision := board.decision(meeting)) is None:
            if self._inside.index == 0:
                num_deaths = self._num_deaths
                arrivals = board.arrivals(meeting, self.replicas)
                if num_deaths > self._num_settled:
                    board.decide(meeting, str(num_deaths))
                elif arrivals is not None:
                    board.decide(meeting, OPEN)
                    continue
            if time.monotonic() - began > self._context.timeout.total_seconds():
                raise RuntimeError(
                    f"timeout: not all replicas came to what they do together after step {self._next_step} within "
                    f"{self._context.timeout.total_seconds():g} s"
                )
            self._links.wait(_ANSWER_SECONDS)
        if decision == OPEN and self._untold:
            arrivals = board.arrivals(meeting, self.replicas)
            assert arrivals is not None
            self._tell_mass(sum(each["mass"] for each in arrivals))
        return decision

    def _tell_mass(self, left: float) -> None:
        """Of a death before: how much push-sum weight is left of all that there was."""
        renounced = self._total - left / self._scale
        self._total, self._scale = left, 1.0
        if self._context.is_logging_rank:
            self._board.tell("mass", self._untold[-1], {"mass": renounced})
            log.warning("push-sum weight renounced with the dead: %.6g of %d", renounced, self._graph.replicas)
        self._untold.clear()

    # -- besides ------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._closing.set()
        self._thread.join(2 * _LOOK_SECONDS + 1.0)

    def _watch(self, address: str) -> None:
        """Look for news, on a connection of its own."""
        try:
            board = connect(address, self._context.timeout)
            while not self._closing.wait(_LOOK_SECONDS):
                num_deaths = board.num_deaths()
                if num_deaths != self._num_deaths:
                    self._num_deaths = num_deaths
                    self._links.nudge()
        except RuntimeError:  # the launcher has gone, and ends this process
            pass
