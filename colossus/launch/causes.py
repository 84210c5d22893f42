"""From what the ranks left behind to the rank that failed first. No torch.

When one rank dies its neighbours fail within milliseconds with ``Connection closed by peer``, so the first
exit a launcher sees is often a victim's. The order here goes by what kind of end it was, then by time.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from colossus.launch.failure import FailureRecord
from colossus.launch.outcome import RankExit
from colossus.launch.stop import STOP_SIGNALS, exit_code

CauseKind = Literal["error", "death", "stuck", "communication"]
_ORDER: tuple[CauseKind, ...] = ("error", "death", "stuck", "communication")
CULPRITS: tuple[CauseKind, ...] = ("error", "death")
"""Of ranks that failed by themselves."""
_STOP_CODES = {exit_code(signum) for signum in STOP_SIGNALS} | {-signum for signum in STOP_SIGNALS}


@dataclass(frozen=True)
class Cause:
    """One rank's failure, and of which kind it is."""

    rank: int
    kind: CauseKind
    record: FailureRecord | None
    exit: RankExit | None


def rank_causes(records: Iterable[FailureRecord], exits: Mapping[int, RankExit]) -> list[Cause]:
    """Every rank that failed, the most likely culprit first.

    Own exceptions come first (those that blame another rank last, else the earliest first), then processes that died
    by themselves (signals, exits without a record), then ranks that had to be ended by force, then communication
    errors.
    """
    by_rank = {record.rank: record for record in records}
    causes = []
    for rank in sorted({*by_rank, *exits}):
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
    if ended is not None and ended.is_early:
        return "death"
    if ended is None or ended.code == 0 or ended.code in _STOP_CODES:
        return None
    if ended.after_stop:
        # SIGKILL is how the launcher ends a rank that answers nothing; any other signal is the rank's own
        if ended.code == -signal.SIGKILL:
            return "stuck"
        return "death" if ended.code < 0 else None
    return "death"


def _urgency(cause: Cause) -> tuple[int, bool, float, int]:
    record = cause.record
    blames_another = record is not None and record.culprit not in (None, cause.rank)
    return _ORDER.index(cause.kind), blames_another, record.time if record is not None else 0.0, cause.rank


def stop_code(found: Iterable[Cause], exits: Mapping[int, RankExit]) -> int | None:
    """The exit code of a run that a signal to some rank stopped cleanly, None when anything failed.

    Args:
        found: of `rank_causes`.
    """
    found = list(found)
    stopped = {rank: ended for rank, ended in exits.items() if ended.code in _STOP_CODES}
    if found:  # perhaps ranks whose peer was stopped before it could tell them
        stopped = {rank: ended for rank, ended in stopped.items() if not ended.after_stop}
        if any(cause.kind != "communication" and cause.rank not in stopped for cause in found):
            return None
    code = next((ended.code for ended in stopped.values()), None)
    return code if code is None or code > 0 else exit_code(-code)
