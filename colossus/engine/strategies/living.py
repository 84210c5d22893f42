"""Which replicas live: how those that are left agree, after a death, from which step on they go on without the dead.

The launcher posts a death in its store (`DeathBoard`). Every replica that hears of it, at a step boundary or while it
waits for a peer, answers with the first step of which it has sent nothing yet, and waits until all have answered. The
largest of the answers is the step from which on all of them mix by a graph over the living. In steps before it they use
the old graph without the dead: what would go to them is kept. What had gone to them is lost; what they had sent counts,
where it has come by the answer, for steps that the receiver has begun. So each can say in its answer what it brings to
the push-sum weight of those that live (`Mass`), and all multiply theirs by one number, so that the mean is 1.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from colossus.comm import collectives
from colossus.comm.peers import PeerLinks
from colossus.context.death_board import OPEN
from colossus.context.parallel_context import ParallelContext
from colossus.engine.strategies.death_news import DeathNews
from colossus.graphs.graph import Graph, StepGraph
from colossus.graphs.reformed import LivingGraph, reform

log = logging.getLogger("colossus.engine")

#: between two looks at what has come
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
        answer: what else this replica tells the others after a death, ``weight`` among it; called with the dead, and
            their messages in flight that have come.
        agreed: called with all replicas' answers, the first step without the dead, the graph from then on, and by what
            push-sum weights are multiplied, so that their mean is 1 again.
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
        answer: Callable[[Sequence[int], Sequence[Any]], Mapping[str, Any]],
        agreed: Callable[[Mapping[int, Mapping[str, Any]], int, Graph, float], None],
    ) -> None:
        super().__init__(context, graph)
        self._graph, self._links, self._name, self._problems, self._kind = graph, links, name, problems, kind
        self._answer, self._agreed = answer, agreed
        self._inside = context.group(context.replica_axes)
        self._news = DeathNews(context, links.nudge)
        self._board = self._news.board
        self._dead: set[int] = set()
        self._num_settled = 0
        #: the first step of which nothing was sent
        self._next_step = 0
        self._num_meetings = 0

    def graph_at(self, step: int) -> StepGraph:
        """What would go to those that are known to be dead is kept, and nothing is to come of them."""
        graph = super().graph_at(step)
        dead = [index for index in self._dead if graph.matrix[index].any()]
        if not dead:
            return graph
        matrix = graph.matrix.copy()
        matrix[range(len(matrix)), range(len(matrix))] += matrix[dead].sum(0)
        matrix[dead], matrix[:, dead] = 0.0, 0.0
        return StepGraph(matrix)

    # -- in each step -------------------------------------------------------------------------------------

    def settle(self, step: int, messages: Sequence[Any]) -> list[Any]:
        self._next_step = step + 1
        self._news.begin()
        return self._settle_messages(messages, step)

    def _settle_messages(self, messages: Sequence[Any], last_due: float) -> list[Any]:
        left = list(messages)
        while True:
            self._wait_for([message for message in left if message.due <= last_due])
            num_deaths, _ = self._agree_inside()
            if num_deaths <= self._num_settled:
                return left
            left = self._settle_deaths(num_deaths, left)

    def _wait_for(self, messages: Sequence[Any]) -> None:
        """Until they are here, or there is news."""
        began, suspected, links = time.monotonic(), math.inf, self._links
        while self._news.num_deaths <= self._num_settled:
            missing = [message for message in messages if not self._is_here(message)]
            if not missing:
                break
            self._news.require_hearing()
            now = time.monotonic()
            lost = next((each for each in missing if links.lost(each.source)), None)
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

    def _agree_inside(self, messages: Sequence[Any] = ()) -> tuple[int, list[Any]]:
        """How many deaths some rank of this replica knows of, and which of these messages some rank has not."""
        numbers = [self._news.num_deaths, *(not self._is_here(message) for message in messages)]
        if self._inside.size > 1:
            values = torch.tensor(numbers, dtype=torch.float64, device=self._context.device)
            numbers = [int(x) for x in collectives.all_reduce(values, self._inside, op="max", owned=True).wait()]
        return numbers[0], [message for message, is_absent in zip(messages, numbers[1:], strict=True) if is_absent]

    # -- a death ------------------------------------------------------------------------------------------

    def _settle_deaths(self, num_deaths: int, messages: Sequence[Any]) -> list[Any]:
        """The messages that count."""
        left = list(messages)
        while self._num_settled < num_deaths:
            left = self._settle(self._num_settled + 1, left)
        return left

    def _settle(self, number: int, messages: Sequence[Any]) -> list[Any]:
        """Agree with all that live on the first step without those that died."""
        death, board, context = self._board.death(number), self._board, self._context
        if self.me in death.replicas:  # the launcher is about to end this process
            time.sleep(_VERDICT_SECONDS)
        of_dead = [message for message in messages if message.source in death.replicas]
        self._await_last(death.replicas, of_dead)
        absent = self._agree_inside(of_dead)[1]
        last = [message for message in of_dead if message not in absent]
        self.replicas = tuple(index for index in self.replicas if index not in death.replicas)
        answer = {"step": self._next_step, **self._answer(death.replicas, last)}
        if self._inside.index == 0:
            board.answer(number, self.me, answer)
        answers = self._await(lambda: board.answers(number, self.replicas), "how they go on after a death")
        start = max(answer["step"] for answer in answers)
        graph, why = reform(self._graph, self.size, self._problems, self._name)
        self._epochs.append((start, LivingGraph(graph, self.replicas, self._graph.replicas)))
        self._dead |= set(death.replicas)
        for index in death.replicas:
            self._links.lose(index, death.reason)
        left = math.fsum(answer["weight"] for answer in answers)
        self._agreed(dict(zip(self.replicas, answers, strict=True)), start, graph, self.size / left)
        self._news.leave_out(death.replicas)
        self._num_settled = number
        if context.is_logging_rank:
            renounced = self.size + len(death.replicas) - left
            board.tell(number, {"step": start + 1, "graph": why or self._name, "mass": renounced})
            others = f"the other {self.size} replicas go on" if self.size > 1 else "the last replica goes on"
            log.warning(
                "%s; from step %d on %s without it (graph: %s); push-sum weight %.6g is renounced",
                *(death.reason, start + 1, others, why or self._name, renounced),
            )
        board.settle(number)
        return [message for message in messages if message not in absent]

    def _await_last(self, dead: Sequence[int], messages: Sequence[Any]) -> None:
        """Until all that the dead had sent has come, or their connections are seen to be closed."""
        deadline = time.monotonic() + _LAST_SECONDS
        while time.monotonic() < deadline:
            missing = [message for message in messages if not self._is_here(message)]
            if all(self._links.lost(message.source) for message in missing):
                return
            self._links.wait(_ANSWER_SECONDS, partial(self._is_any_here, missing))

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
            left = self._settle_deaths(int(decision), left)
            attempt += 1
        return left

    def _gate(self, meeting: str) -> str:
        began, links = time.monotonic(), self._links

        def wait() -> None:
            if time.monotonic() - began > self._context.timeout.total_seconds():
                raise RuntimeError(
                    f"timeout: not all replicas came to what they do together after step {self._next_step} within "
                    f"{self._context.timeout.total_seconds():g} s"
                )
            links.wait(_ANSWER_SECONDS)

        return self._news.decide(meeting, self.replicas, self._num_settled, wait)

    # -- besides ------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._news.close()
