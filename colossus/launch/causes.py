"""From what the ranks left behind to one block that names the rank that failed first. No torch.

When one rank dies its neighbours fail within milliseconds with ``Connection closed by peer``, so the first
exit a launcher sees is often a victim's. The order here goes by what kind of end it was, then by time.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from colossus.context.grid import RankGrid
from colossus.launch.failure import FailureRecord
from colossus.launch.stop import STOP_SIGNALS, exit_code

WIDTH = 100
_STACK_LINES = 40
CauseKind = Literal["error", "death", "stuck", "communication"]
_ORDER: tuple[CauseKind, ...] = ("error", "death", "stuck", "communication")
CULPRITS: tuple[CauseKind, ...] = ("error", "death")
"""Of ranks that failed by themselves."""
STOP_CODES = {exit_code(signum) for signum in STOP_SIGNALS} | {-signum for signum in STOP_SIGNALS}


@dataclass(frozen=True)
class RankExit:
    """How a rank's process ended.

    Attributes:
        code: exit code; negative is the number of the signal that killed it.
        after_stop: it ended after the launcher's stop signal.
        is_finished: whether it came to the end of its program; with exit code 0 only what it left says so.
        stack: of its threads when a signal of its own killed it, where it could leave one.
    """

    code: int
    after_stop: bool = False
    is_finished: bool = True
    stack: str = ""

    @property
    def is_early(self) -> bool:
        """Whether it ended as if all were well, but was not through."""
        return self.code == 0 and not self.after_stop and not self.is_finished


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
    if ended is None or ended.code == 0 or ended.code in STOP_CODES:
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


def was_only_stopped(records: Iterable[FailureRecord], exits: Mapping[int, RankExit]) -> int | None:
    """The exit code of a run that a signal to some rank stopped cleanly, None when anything failed."""
    stopped = {rank: ended for rank, ended in exits.items() if ended.code in STOP_CODES}
    found = rank_causes(records, exits)
    if found:  # perhaps ranks whose peer was stopped before it could tell them
        stopped = {rank: ended for rank, ended in stopped.items() if not ended.after_stop}
        if any(cause.kind != "communication" and cause.rank not in stopped for cause in found):
            return None
    code = next((ended.code for ended in stopped.values()), None)
    return code if code is None or code > 0 else exit_code(-code)


def block(
    causes: list[Cause],
    grid: RankGrid,
    folder: Path | None = None,
    *,
    others: bool = True,
    replicas_keep_step: bool = True,
    missing: Sequence[str] = (),
) -> str:
    """The one block a user reads after a failed run.

    Args:
        causes: of ``rank_causes``.
        folder: the run folder, to be named.
        others: say how the other ranks ended, too.
        missing: who waits in which collective, and who did not come to it (`recordings.who_is_missing`).
        replicas_keep_step: all replicas are in the same step: what one says of it is true of all.
    """
    assert causes, "a block needs something that failed"
    first = causes[0]
    replica = grid.index(first.rank, "data")
    in_step = [each for each in causes if replicas_keep_step or grid.index(each.rank, "data") == replica]
    title = f" run failed: rank {first.rank}{_at_step(in_step)} "
    lines = ["", title.center(WIDTH, "="), f"{_describe_rank(first, grid)} {_describe_failure(first)}"]
    if first.record is not None and first.record.traceback:
        lines += ["", *_indent(first.record.traceback)]
    elif first.exit is not None and first.exit.stack:
        lines += ["", *_indent(first.exit.stack)[:_STACK_LINES]]
    if first.record is not None and first.record.advice:
        lines += ["", *first.record.advice.splitlines()]
    if missing and first.kind in ("stuck", "communication"):
        lines += ["", "who waits for whom:", *(f"  {line}" for line in missing)]
    if first.record is not None and first.record.collectives:
        lines += ["", f"last collectives of rank {first.rank} (newest last):"]
        lines += [f"  {line}" for line in first.record.collectives[-8:]]
    lines += ["", *(_others(causes, grid.world_size) if others else [])]
    if folder is not None:
        lines.append(f"run folder: {folder}")
    lines.append("=" * WIDTH)
    return "\n".join(lines)


def elsewhere(cause: Cause, grid: RankGrid, folder: Path | None) -> str:
    """What the launcher of a node says when the culprit ran on another node, whose launcher prints the block."""
    where = f"; records: {folder / 'failures'}" if folder else ""
    failed = f"{_describe_rank(cause, grid)} {_describe_failure(cause)}"
    return f"run failed: {failed}; the ranks here stopped because of it{where}"


def in_one_line(cause: Cause, grid: RankGrid) -> str:
    """Which rank failed, at which step, and how."""
    if cause.kind == "error" and cause.record is not None:
        failure = f"raised {cause.record.type}: {_shorten(cause.record.message)}"
    else:
        failure = _describe_failure(cause)
    return f"{_describe_rank(cause, grid)}{_at_step([cause])} {failure}"


def gone_block(nodes: Sequence[str], folder: Path | None = None) -> str:
    """What the launchers that are left say when others have gone without a word."""
    title = f" run failed: {nodes[0].split(' (')[0]} has gone "
    lines = ["", title.center(WIDTH, "=")]
    lines += [f"{node} gives no sign of life" for node in nodes]
    lines += ["its launcher was killed, or the machine or its network is down; the ranks here were stopped"]
    if folder is not None:
        lines.append(f"run folder: {folder}")
    return "\n".join([*lines, "=" * WIDTH])


def one_line(record: FailureRecord, folder: Path | None) -> str:
    """What a rank that is not the culprit says when no launcher of ours collects the records."""
    reason = next(iter(record.message.strip().splitlines()), record.type)
    where = f"; its record: {folder / 'failures' / f'rank{record.rank}.json'}" if folder else ""
    if record.kind == "communication":
        return f"rank {record.rank} stopped because another rank went away ({_shorten(reason)}){where}"
    return f"rank {record.rank} failed too: {record.type}: {_shorten(reason)}{where}"


def _describe_rank(cause: Cause, grid: RankGrid) -> str:
    host = f"host {cause.record.host}" if cause.record is not None else ""
    inside = "; ".join(filter(None, (host, grid.where(cause.rank))))
    return f"rank {cause.rank} ({inside})" if inside else f"rank {cause.rank}"


def _describe_failure(cause: Cause) -> str:
    if cause.kind == "death":
        assert cause.exit is not None
        return describe_death(cause.exit.code)
    if cause.kind == "stuck":
        reason = "it was busy or stopped while the other ranks waited for it"
        if cause.record is None:
            return f"answered no signal and had to be killed: {reason}"
        return f"{cause.record.message}: {reason}, here:"
    assert cause.record is not None
    if cause.kind == "communication":
        if cause.record.after_signal is None:
            hint = "no rank failed by itself; this is the earliest communication error"
            hint += " (a rank too slow for comm.timeout_seconds?)" if cause.record.is_timeout else " (network?)"
            return f"raised {cause.record.type}; {hint}"
        return f"raised {cause.record.type} after it had been told to stop"
    return f"raised {cause.record.type}"


def describe_death(code: int) -> str:
    """How a process ended that was not told to: ``was killed by SIGKILL: ...``"""
    if code == 0:
        return "ended with exit code 0 before its training was through (os._exit(0) in the model or in a library?)"
    if code > 0:
        return f"ended with exit code {code} without an exception (os._exit or a native library?)"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hints = {
        "SIGKILL": "out of memory is the most likely reason (see `dmesg`), or somebody killed it",
        "SIGABRT": "a native library gave up; a collective whose shapes or dtypes differ between ranks does this, and "
        "NCCL's watchdog after an error of CUDA, which it prints",
        "SIGSEGV": "a crash in native code; run with PYTHONFAULTHANDLER=1 to see where",
        "SIGBUS": "often a full /dev/shm: see `colossus doctor`",
    }
    hint = f": {hints[name]}" if name in hints else ""
    return f"was killed by {name}{hint}"


def _others(causes: list[Cause], world_size: int) -> list[str]:
    first, rest = causes[0], {cause.rank: cause for cause in causes[1:]}
    lines, victims, same = [], [], []
    for rank in range(world_size):
        if rank == first.rank:
            continue
        cause = rest.get(rank)
        if cause is None or cause.kind == "communication":
            victims.append(rank)
        elif cause.record and first.record and _error_of(cause.record) == _error_of(first.record):
            same.append(rank)
        elif cause.kind == "death":
            lines.append(f"rank {rank} also failed: it {_describe_failure(cause)}")
        elif cause.kind == "stuck":
            lines.append(f"rank {rank} did not stop by itself and was ended.")
        else:
            assert cause.record is not None
            lines.append(f"rank {rank} also failed: {cause.record.type}: {_shorten(cause.record.message)}")
    if same:
        lines.insert(0, f"{_ranks(same)} raised the same error.")
    if victims:
        verb = "went away" if first.kind != "stuck" else "did not answer"
        lines.append(f"{_ranks(victims)} stopped because rank {first.rank} {verb}.")
    waited = [cause.record for cause in rest.values() if cause.record is not None and cause.record.is_timeout]
    if first.kind == "stuck" and waited:  # the earliest says what is missing
        lines.append(f"rank {waited[0].rank} said: {_shorten(waited[0].message)}")
    return lines


def _error_of(record: FailureRecord) -> tuple[str, str]:
    return record.type, record.message


def _ranks(ranks: list[int]) -> str:
    """``rank 0``, ``ranks 0, 2, 3``, and ranges when there are many."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    ranges = [f"{run[0]}-{run[-1]}" if len(run) > 3 else ", ".join(map(str, run)) for run in runs]
    return "ranks " + ", ".join(ranges)


def _at_step(causes: list[Cause]) -> str:
    if causes[0].record is not None:
        step = causes[0].record.step
    else:  # it left no record, but the ranks that waited for it were at the same step
        step = next((cause.record.step for cause in causes if cause.record is not None), None)
        if step is None:
            return ""
    return f" at step {step}" if step is not None else " before the first step"


def _indent(text: str) -> list[str]:
    return [f"  {line}" for line in text.rstrip().splitlines()]


def _shorten(text: str, most: int = 160) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 3] + "..."
