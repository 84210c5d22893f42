"""The report of a launcher at the end of a run, and its exit code. No torch."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.folder import find_latest, root_of
from colossus.checkpoint.manifest import read_manifest
from colossus.comm.peer_gone import OPEN_FILES_ERROR
from colossus.config import Config
from colossus.context.grid import RankGrid
from colossus.launch import failures, run_folder
from colossus.launch.advice import has_few_open_files, open_files_advice
from colossus.launch.failures import FailureRecord
from colossus.launch.outcome import Cause, Outcome, stop_code
from colossus.launch.recordings import ranks_in_words, who_is_missing
from colossus.launch.stop import exit_code

DONE, FAILED, USAGE = 0, 1, 2
_WIDTH = 100


def report(outcome: Outcome, config: Config, grid: RankGrid) -> int:
    """Print the report of an attempt, and return its exit code.

    Args:
        outcome: the outcome of the attempt.
        config: its config.
        grid: its ranks.
    """
    folder, ends = outcome.folder, [outcome, *outcome.others]
    exits, causes = outcome.of_all_nodes()
    has_culprit = bool(causes) and causes[0].is_own
    server = next((end.server for end in ends if end.server is not None), None)
    signum = next((end.signum for end in ends if end.signum and not end.leaves), None)
    code = exit_code(signum) if signum is not None else None
    if code is None and server is None and not outcome.gone:
        if exits and all(ended.is_good for ended in exits.values()):
            return DONE
        code = stop_code(causes, exits)
        signum = code - 128 if code is not None else None
    if code is not None:
        print(stopped_line(folder, config, signum))
    if server is not None:
        lines = [server, "Parameters live at the servers, so the workers were stopped."]
        _print(_framed(server.split(" (")[0], lines, folder))
    elif code is not None:
        return _code_of_stop(outcome, code, causes, config, grid)
    elif outcome.gone and not has_culprit:
        lines = [f"{node} gives no sign of life" for node in outcome.gone]
        lines += ["its launcher was killed, or the machine or its network is down; the ranks here were stopped"]
        _print(_framed(f"{outcome.gone[0].split(' (')[0]} has gone", lines, folder))
    elif not causes:
        _print(f"colossus: the run ended with exit codes {exits} and no record in {folder}")
    elif causes[0].record is not None and causes[0].record.kind == "config":
        _print(f"colossus: {causes[0].record.message}")
        return USAGE
    elif causes[0].rank in outcome.exits or len(outcome.exits) == grid.world_size:
        _print(block(causes, grid, folder))
    else:  # the launcher of the culprit's node prints the block
        failed = f"{_describe_rank(causes[0], grid)} {_describe_failure(causes[0])}"
        _print(f"run failed: {failed}; the ranks here stopped because of it")
    return FAILED


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


def _code_of_stop(outcome: Outcome, code: int, causes: Sequence[Cause], config: Config, grid: RankGrid) -> int:
    """Return the exit code of a stop; where the last checkpoint was not saved, return 1 and print the reason."""
    folder = outcome.folder
    if not config.checkpoint.every or folder is None or outcome.is_hurried:
        return code
    for record in filter(None, (cause.record for cause in causes)):
        # a save that failed because another rank has ended is not the cause
        if record.type == CheckpointError.__name__ and record.kind != "communication":
            _print(f"colossus: {record.message}")
            return FAILED
    # a rank that is stopped before its first step has a record of kind "stuck", too, but no step
    culprits = [
        cause for cause in causes if cause.kind in ("death", "stuck") and (not cause.record or cause.record.step)
    ]
    row, latest = run_folder.last_metrics(folder), _latest(config, folder)
    saved = read_manifest(latest).step if latest is not None else 0
    is_unsaved = row is not None and row.get("time", 0.0) >= outcome.started and saved < row["step"]
    if not culprits and not is_unsaved:
        return code
    if row is not None and is_unsaved:
        _print(f"colossus: step {row['step']} was the last, and no checkpoint of it was saved")
    if causes:
        _print(block(culprits or causes, grid, folder))
    return FAILED


# -- a run that failed ----------------------------------------------------------------------------------------


def block(causes: Sequence[Cause], grid: RankGrid, folder: Path | None = None, *, others: bool = True) -> str:
    """Return the one block of text that a user reads after a failed run.

    Args:
        causes: the result of `rank_causes`, with at least one.
        grid: the ranks of the run.
        folder: the run folder, which is named.
        others: whether to describe the ends of the other ranks, too.
    """
    first, record = causes[0], causes[0].record
    lines = [f"{_describe_rank(first, grid)} {_describe_failure(first)}"]
    if record is not None and record.traceback:
        lines += ["", *(f"  {line}" for line in record.traceback.rstrip().splitlines())]
    if record is not None and record.advice:
        lines += ["", *record.advice.splitlines()]
    if not first.is_own:
        missing = who_is_missing(folder, [cause.record for cause in causes if cause.record is not None], grid)
        lines += ["", "who waits for whom:", *(f"  {line}" for line in missing)] if missing else []
    if record is not None and record.collectives:
        lines += ["", f"last collectives of rank {first.rank} (newest last):"]
        lines += [f"  {line}" for line in record.collectives[-8:]]
    lines += ["", *(_others(causes, grid.world_size) if others else [])]
    return _framed(f"rank {first.rank}{_at_step(causes)}", lines, folder)


def _framed(what: str, lines: Sequence[str], folder: Path | None) -> str:
    where = [f"run folder: {folder}"] if folder is not None else []
    return "\n".join(["", f" run failed: {what} ".center(_WIDTH, "="), *lines, *where, "=" * _WIDTH])


def summary(causes: Sequence[Cause]) -> str:
    """Return one line on the first cause: ``rank 1 at step 7 raised ValueError: no such file``."""
    first = causes[0]
    message = f": {_shorten(first.record.message)}" if first.kind == "error" and first.record is not None else ""
    return f"rank {first.rank}{_at_step(causes)} {_describe_failure(first)}{message}"


def _at_step(causes: Sequence[Cause]) -> str:
    """Return the step of the culprit; where it has no record, "near" that of another rank, whose step may differ."""
    own = causes[0].record
    record = own or next((cause.record for cause in causes if cause.record is not None), None)
    if record is None:
        return ""
    if record.step is None:
        return " before the first step"
    return f" {'at' if own else 'near'} step {record.step}"


def one_line(record: FailureRecord, folder: Path | None) -> str:
    """Return the line that a rank which is not the culprit prints where no launcher of ours collects the records."""
    how = "stopped because another rank went away" if record.kind == "communication" else "failed too"
    where = f"; its record: {folder / failures.FOLDER / f'rank{record.rank}.json'}" if folder else ""
    return f"rank {record.rank} {how}: {record.type}: {_shorten(record.message)}{where}"


def _describe_rank(cause: Cause, grid: RankGrid) -> str:
    host = f"host {cause.record.host}" if cause.record is not None else ""
    inside = "; ".join(filter(None, (host, grid.where(cause.rank))))
    return f"rank {cause.rank} ({inside})" if inside else f"rank {cause.rank}"


def _describe_failure(cause: Cause) -> str:
    record = cause.record
    if cause.kind == "death":
        assert cause.exit is not None
        return describe_death(cause.exit.code)
    if cause.kind == "stuck":
        message = record.message if record is not None else "answered no signal and had to be killed"
        return f"{message}: it was busy or stopped while the other ranks waited for it"
    assert record is not None
    if cause.kind == "error":
        return f"raised {record.type}"
    if record.after_signal is not None:
        return f"raised {record.type} after it had been told to stop"
    hint = "a rank too slow for comm.timeout_seconds?" if record.is_timeout else "network?"
    return f"raised {record.type}; no rank failed by itself; this is the earliest communication error ({hint})"


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


def _others(causes: Sequence[Cause], world_size: int) -> list[str]:
    """Return lines on the ends of the ranks other than the culprit."""
    first, rest = causes[0], {cause.rank: cause for cause in causes[1:]}
    lines: list[str] = []
    victims: list[int] = []
    same: list[int] = []
    for rank in sorted({*range(world_size)} - {first.rank}):
        cause = rest.get(rank)
        if cause is None or cause.kind == "communication":
            victims.append(rank)
        elif cause.record is None:
            lines.append(f"rank {rank} also failed: it {_describe_failure(cause)}")
        elif first.record is not None and cause.record.message == first.record.message:
            same.append(rank)
        else:
            lines.append(f"rank {rank} also failed: {cause.record.type}: {_shorten(cause.record.message)}")
    if same:
        lines.insert(0, f"{ranks_in_words(same)} raised the same error.")
    if victims:
        verb = "went away" if first.kind != "stuck" else "did not answer"
        lines.append(f"{ranks_in_words(victims)} stopped because rank {first.rank} {verb}.")
    return lines


def _shorten(text: str, most: int = 160) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 3] + "..."
