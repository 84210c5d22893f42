"""What one launcher does about deaths of ranks that the run goes on without: it looks, ends partners, and sums up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

from torch.distributed.elastic.multiprocessing import SignalException

from colossus.context.death_board import connect
from colossus.context.grid import RankGrid
from colossus.launch.causes import RankExit
from colossus.launch.deaths import Deaths
from colossus.launch.failure import FailureRecord
from colossus.launch.nodes import Nodes
from colossus.launch.outcome import Outcome

_STORE_TIMEOUT = timedelta(seconds=60)
#: after the end of the last rank
_LAST_SECONDS = 1.0


class DeathWatch:
    """
    Args:
        address: ``host:port`` of the store of all nodes' launchers and ranks.
        here: the ranks of this node.
        nodes: the other nodes; None where there are none.
        records: reads the failure records of this node's ranks.
        are_independent: see `Deaths`.
    """

    def __init__(
        self,
        grid: RankGrid,
        here: Sequence[int],
        address: str,
        nodes: Nodes | None,
        records: Callable[[], Iterable[FailureRecord]],
        *,
        are_independent: bool = False,
    ) -> None:
        board = connect(address, _STORE_TIMEOUT)
        self._deaths = Deaths(grid, here, board, records, are_independent=are_independent)
        self._nodes = nodes

    @property
    def lost(self) -> set[int]:
        """Ranks that the run goes on without."""
        return self._deaths.lost

    @property
    def is_suspicious(self) -> bool:
        """Whether a rank has failed of which it is not said yet what becomes of it."""
        return self._deaths.is_suspicious

    def stopping(self) -> None:
        """All are told to stop from here on."""
        self._deaths.is_stopping = True

    def look(self, exits: Mapping[int, RankExit]) -> list[int] | None:
        """Ranks of replicas that are lost, which are to be ended; None: the run cannot go on."""
        deaths, nodes = self._deaths, self._nodes
        try:
            to_end = deaths.look(exits, nodes.gone_ranks() if nodes is not None else ())
        except RuntimeError:  # the store has gone, with the node that holds it
            deaths.verdict = "the node that holds the run's store has gone"
        if deaths.verdict is not None:
            return None
        if nodes is not None:
            nodes.forgive(deaths.lost)
        return to_end

    def judge_last(self, exits: Mapping[int, RankExit]) -> None:
        """A rank may have died just before the last of the others had ended."""
        deaths, deadline = self._deaths, time.monotonic() + _LAST_SECONDS
        with suppress(RuntimeError, SignalException):
            deaths.look(exits)
            while deaths.verdict is None and deaths.is_suspicious and time.monotonic() < deadline:
                time.sleep(0.05)
                deaths.look(exits)

    def sum_up(self, outcome: Outcome) -> None:
        """Write down what the run went on without, and why it could not."""
        deaths = self._deaths
        with suppress(RuntimeError):  # the store has gone
            deaths.look(outcome.exits)
            outcome.losses = deaths.told()
        outcome.lost = deaths.lost
        if outcome.signum is None or deaths.has_culprit:
            outcome.verdict = deaths.verdict
