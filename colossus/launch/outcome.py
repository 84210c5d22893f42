"""The ends of a run's ranks, and which of them failed first. No torch.

When one rank dies its neighbours fail within milliseconds with ``Connection closed by peer``, so the first exit that a
launcher sees is often a victim's. Here ends are ordered by their kind, then by time.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from colossus.config import Config
from colossus.launch import failures
from colossus.launch.failures import FailureRecord
from colossus.launch.stop import STOP_SIGNALS, exit_code


@dataclass(frozen=True)
class RankExit:
    """The end of a rank's process.

    Attributes:
        code: its exit code, or the negative number of the signal that killed it.
        after_stop: whether it ended after the launcher's stop signal.
        is_finished: whether it came to the end of its program, which exit code 0 alone does not show.
    """

    code: int
    after_stop: bool = False
    is_finished: bool = True

    @property
    def is_early(self) -> bool:
        """Return whether it exited with 0 before it had finished."""
        return self.code == 0 and not self.after_stop and not self.is_finished

    @property
    def is_good(self) -> bool:
        return self.code == 0 and not self.is_early


@dataclass
class NodeEnd:
    """The end of one node's ranks, which its launcher reports to the other nodes.

    Attributes:
        exits: global rank -> the end of its process.
        signum: the signal that its launcher received, or None.
        records: the records of its failed ranks.
        server: a text on the death of its parameter server that ended the run, or None.
        is_spare: whether it had no ranks, since the plan needs fewer nodes.
        regroups: whether it has stopped the ranks of all nodes so that new nodes can take part.
        leaves: whether it was stopped and the other nodes go on without it.
    """

    exits: dict[int, RankExit] = field(default_factory=dict)
    signum: int | None = None
    records: Sequence[FailureRecord] = ()
    server: str | None = None
    is_spare: bool = False
    regroups: bool = False
    leaves: bool = False

    @property
    def is_good(self) -> bool:
        """Return whether all ranks came to the end of their program; a spare node has none."""
        if self.signum is not None or self.server is not None or self.regroups:
            return False
        if not self.exits and not self.is_spare:
            return False
        return all(ended.is_good for ended in self.exits.values())


@dataclass
class Outcome(NodeEnd):
    """The end of an attempt, as the launcher of one node knows it.

    Attributes:
        config: the config of the attempt, with its plan; None before the nodes have met.
        folder: the run folder of all nodes; None before they have agreed on it.
        node: the number of this node; None before it has met others, or without others.
        is_hurried: whether a second Ctrl-C has asked to end without a checkpoint.
        late_signum: a stop signal that came when the ranks were being ended already.
        others: the ends of the other nodes that have reported theirs.
        gone: the other nodes that are silent, as text.
        started: the time at which this attempt began, in seconds since the epoch.
    """

    config: Config | None = None
    folder: Path | None = None
    node: int | None = None
    is_hurried: bool = False
    late_signum: int | None = None
    others: Sequence[NodeEnd] = ()
    gone: Sequence[str] = ()
    started: float = field(default_factory=time.time)

    @property
    def is_regrouped(self) -> bool:
        """Return whether the ranks were stopped because nodes join or leave, and no rank failed.

        A rank that is stopped before its first step has a record, but has not failed.
        """
        exits, causes = self.of_all_nodes()
        causes = [cause for cause in causes if not cause.is_of_start_up]
        ends: list[NodeEnd] = [self, *self.others]
        if not any(end.regroups or end.leaves for end in ends) or self.gone or self.late_signum is not None:
            return False
        is_stopped = self.signum is not None or any(end.signum is not None and not end.leaves for end in self.others)
        return not is_stopped and stop_code(causes, exits) is not None

    def of_all_nodes(self) -> tuple[dict[int, RankExit], list[Cause]]:
        """Return the ends of the ranks of all nodes, as far as they are known here, and their `rank_causes`."""
        records = {record.rank: record for record in failures.read_all(self.folder)} if self.folder is not None else {}
        exits = dict[int, RankExit]()
        for end in (*self.others, self):
            exits |= end.exits
            records |= {record.rank: record for record in end.records}
        return exits, rank_causes(records.values(), exits)


# -- who failed first -----------------------------------------------------------------------------------------

CauseKind = Literal["error", "death", "stuck", "communication"]
_ORDER: tuple[CauseKind, ...] = ("error", "death", "stuck", "communication")
_STOP_CODES = {exit_code(signum) for signum in STOP_SIGNALS} | {-signum for signum in STOP_SIGNALS}


@dataclass(frozen=True)
class Cause:
    """The failure of one rank, with its kind."""

    rank: int
    kind: CauseKind
    record: FailureRecord | None
    exit: RankExit | None

    @property
    def is_own(self) -> bool:
        """Return whether the rank failed by itself."""
        return self.kind in ("error", "death")

    @property
    def is_of_start_up(self) -> bool:
        """Return whether the rank was stopped before its first step, when it cannot end cleanly yet."""
        if self.record is None or self.exit is None:
            return False
        return self.kind == "stuck" and self.record.step is None and self.exit.after_stop


def rank_causes(records: Iterable[FailureRecord], exits: Mapping[int, RankExit]) -> list[Cause]:
    """Return the cause of every rank that failed, the most likely culprit first.

    The order is: exceptions of a rank's own, the earliest first; processes that died by themselves (by signals, or
    exits without a record); ranks that had to be ended by force; communication errors.
    """
    by_rank = {record.rank: record for record in records}
    causes = []
    for rank in {*by_rank, *exits}:
        record, ended = by_rank.get(rank), exits.get(rank)
        kind = _kind(record, ended)
        if kind is not None:
            causes.append(Cause(rank, kind, record, ended))
    return sorted(causes, key=_urgency)


def _kind(record: FailureRecord | None, ended: RankExit | None) -> CauseKind | None:
    if record is not None:
        if record.kind in ("error", "config"):
            # an error after the stop signal most often comes from the stop itself (a loader's process is gone, ...)
            return "error" if record.after_signal is None else "communication"
        return "stuck" if record.kind == "stuck" else "communication"
    if ended is None or ended.is_good or ended.code in _STOP_CODES:
        return None
    if ended.after_stop:
        # the launcher ends a rank that does not answer by SIGKILL; any other signal is the rank's own
        if ended.code == -signal.SIGKILL:
            return "stuck"
        return "death" if ended.code < 0 else None
    return "death"


def _urgency(cause: Cause) -> tuple[int, float, int]:
    return _ORDER.index(cause.kind), cause.record.time if cause.record is not None else 0.0, cause.rank


def stop_code(causes: Sequence[Cause], exits: Mapping[int, RankExit]) -> int | None:
    """Return the exit code of a run that a signal to some rank stopped cleanly, or None where anything failed.

    Args:
        causes: the result of `rank_causes`.
        exits: the ends of all ranks.
    """
    stopped = {rank: ended for rank, ended in exits.items() if ended.code in _STOP_CODES}
    if causes:  # possibly of ranks whose peer was stopped before it could pass the stop on
        stopped = {rank: ended for rank, ended in stopped.items() if not ended.after_stop}
        if any(cause.kind != "communication" and cause.rank not in stopped for cause in causes):
            return None
    code = next((ended.code for ended in stopped.values()), None)
    return code if code is None or code > 0 else exit_code(-code)
