"""How the ranks of a run ended, and which of them failed first. No torch.

When one rank dies its neighbours fail within milliseconds with ``Connection closed by peer``, so the first
exit a launcher sees is often a victim's. The order here goes by what kind of end it was, then by time.
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
    """How a rank's process ended.

    Attributes:
        code: exit code; negative is the number of the signal that killed it.
        after_stop: it ended after the launcher's stop signal.
        is_finished: whether it came to the end of its program; with exit code 0 only the file it left says so.
    """

    code: int
    after_stop: bool = False
    is_finished: bool = True

    @property
    def is_early(self) -> bool:
        """Whether it exited with 0 before it had finished."""
        return self.code == 0 and not self.after_stop and not self.is_finished

    @property
    def is_good(self) -> bool:
        return self.code == 0 and not self.is_early


@dataclass
class NodeEnd:
    """How the ranks of one node ended, as its launcher tells the others.

    Attributes:
        exits: global rank -> how its process ended.
        signum: the signal its launcher received, None when there was none.
        records: of its ranks that failed.
        server: how the parameter server of it has ended that has ended the run, in words.
        is_spare: it had no ranks, since the plan needs fewer nodes.
        regroups: it has stopped the ranks of all nodes because nodes have come that are to take part.
        leaves: it was stopped, and the others are to go on without it.
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
        """Whether there were ranks, or none to be, and all came to the end of their program."""
        if self.signum is not None or self.server is not None or self.regroups:
            return False
        if not self.exits and not self.is_spare:
            return False
        return all(ended.is_good for ended in self.exits.values())


@dataclass
class Outcome(NodeEnd):
    """How a run ended, as the launcher of one node knows it.

    Attributes:
        config: of the attempt, with its plan; None before the nodes have met.
        folder: the run folder all nodes agreed on, None before they have.
        node: number of this node; None before it has met others.
        is_hurried: a second Ctrl-C has asked to end without a checkpoint.
        late_signum: a stop signal that came when the ranks were being ended already.
        others: how the ranks of other nodes ended, as far as they have said.
        gone: the nodes that give no sign of life any more, in words.
        started: when this launcher did, in seconds since the epoch.
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
        """Whether the ranks were stopped because other nodes are to take part, or this one goes on without one that
        leaves, and none failed. One that is stopped before its first step has a record, and has not failed.
        """
        exits, causes = self.of_all_nodes()
        causes = [cause for cause in causes if not cause.is_of_start_up]
        ends: list[NodeEnd] = [self, *self.others]
        if not any(end.regroups or end.leaves for end in ends) or self.gone or self.late_signum is not None:
            return False
        is_stopped = self.signum is not None or any(end.signum is not None and not end.leaves for end in self.others)
        return not is_stopped and stop_code(causes, exits) is not None

    def of_all_nodes(self) -> tuple[dict[int, RankExit], list[Cause]]:
        """How the ranks of all nodes ended, as far as that is known here, and `rank_causes` of it."""
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
    """One rank's failure, and of which kind it is."""

    rank: int
    kind: CauseKind
    record: FailureRecord | None
    exit: RankExit | None

    @property
    def is_own(self) -> bool:
        """Whether the rank failed by itself."""
        return self.kind in ("error", "death")

    @property
    def is_of_start_up(self) -> bool:
        """Whether it was told to stop before there was anything to end in order."""
        if self.record is None or self.exit is None:
            return False
        return self.kind == "stuck" and self.record.step is None and self.exit.after_stop


def rank_causes(records: Iterable[FailureRecord], exits: Mapping[int, RankExit]) -> list[Cause]:
    """Every rank that failed, the most likely culprit first.

    Own exceptions come first, the earliest first, then processes that died by themselves (signals, exits without a
    record), then ranks that had to be ended by force, then communication errors.
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
            # an error after the stop signal is most often the stop itself (a loader's process is gone, ...)
            return "error" if record.after_signal is None else "communication"
        return "stuck" if record.kind == "stuck" else "communication"
    if ended is None or ended.is_good or ended.code in _STOP_CODES:
        return None
    if ended.after_stop:
        # SIGKILL is how the launcher ends a rank that answers nothing; any other signal is the rank's own
        if ended.code == -signal.SIGKILL:
            return "stuck"
        return "death" if ended.code < 0 else None
    return "death"


def _urgency(cause: Cause) -> tuple[int, float, int]:
    return _ORDER.index(cause.kind), cause.record.time if cause.record is not None else 0.0, cause.rank


def stop_code(found: Sequence[Cause], exits: Mapping[int, RankExit]) -> int | None:
    """The exit code of a run that a signal to some rank stopped cleanly, None when anything failed.

    Args:
        found: of `rank_causes`.
    """
    stopped = {rank: ended for rank, ended in exits.items() if ended.code in _STOP_CODES}
    if found:  # perhaps ranks whose peer was stopped before it could tell them
        stopped = {rank: ended for rank, ended in stopped.items() if not ended.after_stop}
        if any(cause.kind != "communication" and cause.rank not in stopped for cause in found):
            return None
    code = next((ended.code for ended in stopped.values()), None)
    return code if code is None or code > 0 else exit_code(-code)
