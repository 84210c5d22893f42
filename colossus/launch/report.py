"""The report of a launcher at the end of an attempt. No torch."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from colossus.arithmetic import named_ranks
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.folder import find_latest, root_of
from colossus.checkpoint.manifest import read_manifest
from colossus.comm.peer_gone import OPEN_FILES_ERROR
from colossus.config import Config
from colossus.context.grid import RankGrid
from colossus.launch import attempt_log, run_folder
from colossus.launch.advice import has_few_open_files, open_files_advice
from colossus.launch.decide import FAILED, Restart, Stop, lost_by_stop
from colossus.launch.ends import AttemptEnd, RankEnd
from colossus.launch.recordings import who_is_missing

_WIDTH = 100


def report(end: AttemptEnd, decision: Restart | Stop, config: Config, grid: RankGrid, max_restarts: int = 0) -> None:
    """Print the report of an attempt: what failed, and what follows.

    Args:
        end: the end of the attempt.
        decision: the decision about it.
        config: its config.
        grid: its ranks.
        max_restarts: the limit of restarts.
    """
    if isinstance(decision, Restart) and not decision.count:
        text = f"{cause_of(end, decision)}: the ranks were stopped, and start again on the nodes that are there"
        _print(f"colossus: {text}")
        return
    _report_end(end, config, grid)
    if isinstance(decision, Restart):
        _print(f"colossus: restart {decision.count} of {max_restarts}: the ranks start again")
    elif decision.reason:
        _print(f"colossus: no restart: {decision.reason}")


def _report_end(end: AttemptEnd, config: Config, grid: RankGrid) -> None:
    folder, causes, server, code = end.folder, end.failed, end.dead_server, end.stop_code
    if code is not None:
        signums = [node.signum for node in end.nodes if node.signum and not node.leaves]
        print(stopped_line(folder, config, next(iter(signums), code - 128)))
    if server is not None:
        lines = [server, "Parameters live at the servers, so the workers were stopped."]
        _print(_framed(server.split(" (")[0], lines, folder))
    elif code is not None:
        if (lost := lost_by_stop(end)) is not None:
            _report_lost(end, lost, grid)
    elif end.gone and not (causes and causes[0].is_own):
        lines = [f"{node} gives no sign of life" for node in end.gone.values()]
        lines += ["its launcher was killed, or the machine or its network is down; the ranks here were stopped"]
        _print(_framed(cause_of(end), lines, folder))
    elif not causes:
        if not all(rank.is_good for rank in end.all_ranks) or not end.all_ranks:
            codes = {rank.rank: rank.code for rank in end.all_ranks}
            _print(f"colossus: the run ended with exit codes {codes} and no record in {folder}")
    elif causes[0].kind == "config":
        _print(f"colossus: {causes[0].message}")
    elif causes[0].rank in end.ranks or len(end.ranks) == grid.world_size:
        _print(block(causes, grid, folder))
    else:  # the launcher of the culprit's node prints the block
        failed = f"{_describe_rank(causes[0], grid)} {_describe_failure(causes[0])}"
        _print(f"run failed: {failed}; the ranks here stopped because of it")


def cause_of(end: AttemptEnd, decision: Restart | Stop | None = None) -> str:
    """Return the cause of an attempt's end as one line; empty for a good one."""
    if isinstance(decision, Restart) and not decision.count:
        return "a node has left" if any(node.leaves for node in end.others.values()) else "more nodes are there"
    causes = end.failed
    if end.dead_server is not None:
        return end.dead_server.splitlines()[0]
    if causes and (causes[0].is_own or not end.gone):
        return summary(causes).splitlines()[0]
    if end.gone:
        return f"{next(iter(end.gone.values())).split(' (')[0]} has gone"
    if isinstance(decision, Stop) and decision.code != FAILED:
        return ""
    return "ranks ended early"


def _print(text: str) -> None:
    print(text, file=sys.stderr)


# -- a run that was stopped -----------------------------------------------------------------------------------


def stopped_line(folder: Path | None, config: Config, signum: int | None) -> str:
    """Return a line on a stopped run, by the files that it left, so that it is also true after a hard end.

    Args:
        folder: the run folder; None where there is none yet.
        config: the config of the run.
        signum: the stop signal, or None.
    """
    by = f"by {signal.Signals(signum).name} " if signum else ""
    if folder is None:
        return f"stopped {by}before it began"
    row = run_folder.last_metrics(folder)
    if row is None:
        return f"stopped {by}before the first step was complete; run folder {folder}"
    line = f"stopped {by}after step {row['step']}; metrics are in {folder / run_folder.METRICS}"
    latest = _latest(config, folder)
    if latest is None:
        return f"{line}; no checkpoint was saved" if config.checkpoint.every else line
    return f"{line}; the latest checkpoint is {latest}, `colossus launch .. --resume` continues from there"


def _latest(config: Config, folder: Path) -> Path | None:
    with contextlib.suppress(CheckpointError):
        return find_latest(root_of(config.checkpoint.dir, folder))
    return None


def unsaved_step(config: Config, folder: Path, started: float) -> int | None:
    """Return the last step of a run's metrics, where an attempt has trained it and no checkpoint has it; else None.

    Args:
        config: the config of the run.
        folder: its folder.
        started: the time at which the attempt began, in seconds since the epoch.
    """
    row = run_folder.last_metrics(folder) if config.checkpoint.every else None
    if row is None or row.get("time", 0.0) < started:
        return None
    latest = _latest(config, folder)
    saved = read_manifest(latest).step if latest is not None else 0
    return row["step"] if saved < row["step"] else None


def _report_lost(end: AttemptEnd, lost: Sequence[RankEnd], grid: RankGrid) -> None:
    """Print why the steps that a stop was to save are lost."""
    if lost and lost[0].type == CheckpointError.__name__ and lost[0].kind != "communication":
        _print(f"colossus: {lost[0].message}")
        return
    if end.unsaved_step is not None:
        _print(f"colossus: step {end.unsaved_step} was the last, and no checkpoint of it was saved")
    if lost:
        _print(block(lost, grid, end.folder))


# -- a run that failed ----------------------------------------------------------------------------------------


def block(causes: Sequence[RankEnd], grid: RankGrid, folder: Path | None = None, *, others: bool = True) -> str:
    """Return the one block of text that a user reads after a failed run.

    Args:
        causes: the ranks that failed, the culprit first (`ends.failed`); at least one.
        grid: the ranks of the run.
        folder: the run folder, which is named.
        others: whether to describe the ends of the other ranks, too.
    """
    first = causes[0]
    lines = [f"{_describe_rank(first, grid)} {_describe_failure(first)}"]
    if first.traceback:
        lines += ["", *(f"  {line}" for line in first.traceback.rstrip().splitlines())]
    if first.advice:
        lines += ["", *first.advice.splitlines()]
    if not first.is_own:
        missing = who_is_missing(folder, causes, grid)
        lines += ["", "who waits for whom:", *(f"  {line}" for line in missing)] if missing else []
    if first.collectives:
        lines += ["", f"last collectives of rank {first.rank} (newest last):"]
        lines += [f"  {line}" for line in first.collectives[-8:]]
    lines += ["", *(_others(causes, grid.world_size) if others else [])]
    return _framed(f"rank {first.rank}{_at_step(causes)}", lines, folder)


def _framed(what: str, lines: Sequence[str], folder: Path | None) -> str:
    where = [f"run folder: {folder}"] if folder is not None else []
    return "\n".join(["", f" run failed: {what} ".center(_WIDTH, "="), *lines, *where, "=" * _WIDTH])


def summary(causes: Sequence[RankEnd]) -> str:
    """Return one line on the first cause: ``rank 1 at step 7 raised ValueError: no such file``."""
    first = causes[0]
    message = f": {_shorten(first.message)}" if first.cause == "error" else ""
    return f"rank {first.rank}{_at_step(causes)} {_describe_failure(first)}{message}"


def _at_step(causes: Sequence[RankEnd]) -> str:
    """Return the step of the culprit; where it has no record, "near" that of another rank, whose step may differ."""
    with_record = next((end for end in causes if end.has_record), None)
    if with_record is None:
        return ""
    if with_record.step is None:
        return " before the first step"
    return f" {'at' if with_record is causes[0] else 'near'} step {with_record.step}"


def one_line(end: RankEnd, folder: Path | None) -> str:
    """Return the line that a rank which is not the culprit prints where no launcher of ours collects the ends."""
    how = "stopped because another rank went away" if end.kind == "communication" else "failed too"
    where = f"; its record: {folder / attempt_log.ROWS}" if folder else ""
    return f"rank {end.rank} {how}: {end.type}: {_shorten(end.message)}{where}"


def _describe_rank(end: RankEnd, grid: RankGrid) -> str:
    inside = "; ".join(filter(None, (end.host and f"host {end.host}", grid.where(end.rank))))
    return f"rank {end.rank} ({inside})" if inside else f"rank {end.rank}"


def _describe_failure(end: RankEnd) -> str:
    if end.cause == "death":
        assert end.code is not None
        return describe_death(end.code)
    if end.cause == "stuck":
        message = end.message or "answered no signal and had to be killed"
        return f"{message}: it was busy or stopped while the other ranks waited for it"
    if end.cause == "error":
        return f"raised {end.type}"
    if end.after_signal is not None:
        return f"raised {end.type} after it had been told to stop"
    hint = "a rank too slow for comm.timeout_seconds?" if end.is_timeout else "network?"
    return f"raised {end.type}; no rank failed by itself; this is the earliest communication error ({hint})"


_DEATHS = {
    "SIGKILL": "out of memory is the most likely reason (see `dmesg`), or somebody killed it",
    "SIGABRT": "a native library gave up; a collective whose shapes or dtypes differ between ranks does this, and "
    "NCCL's watchdog after an error of CUDA, which it prints",
    "SIGSEGV": "a crash in native code; its stacks are above",
    "SIGBUS": "a full /dev/shm is the most likely reason (`df /dev/shm`): docker run --shm-size=8g, or --ipc=host",
}


def describe_death(code: int) -> str:
    """Return a text on a process that ended by itself: ``was killed by SIGKILL: ...``."""
    if code == 0:
        return "ended with exit code 0 before training was through (os._exit(0) in the model or in a library?)"
    if code > 0:
        return f"ended with exit code {code} without an exception (os._exit or a native library?)"
    names = {member.value: member.name for member in signal.Signals}
    name = names.get(-code, f"signal {-code}")
    if name == "SIGABRT" and has_few_open_files():
        return f'was killed by {name}; if it says "{OPEN_FILES_ERROR}" above: {open_files_advice()}'
    return f"was killed by {name}{f': {_DEATHS[name]}' if name in _DEATHS else ''}"


def _others(causes: Sequence[RankEnd], world_size: int) -> list[str]:
    """Return lines on the ends of the ranks other than the culprit."""
    first, rest = causes[0], {end.rank: end for end in causes[1:]}
    lines: list[str] = []
    victims: list[int] = []
    same: list[int] = []
    for rank in sorted({*range(world_size)} - {first.rank}):
        end = rest.get(rank)
        if end is None or end.cause == "communication":
            victims.append(rank)
        elif not end.has_record:
            lines.append(f"rank {rank} also failed: it {_describe_failure(end)}")
        elif first.has_record and end.message == first.message:
            same.append(rank)
        else:
            lines.append(f"rank {rank} also failed: {end.type}: {_shorten(end.message)}")
    if same:
        lines.insert(0, f"{named_ranks(same)} raised the same error.")
    if victims:
        verb = "went away" if first.cause != "stuck" else "did not answer"
        lines.append(f"{named_ranks(victims)} stopped because rank {first.rank} {verb}.")
    return lines


def _shorten(text: str, most: int = 160) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 3] + "..."
