"""What the user of one launcher reads at the end of a run, and the exit code. No torch."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.folder import find_latest, root_of
from colossus.checkpoint.manifest import read_manifest
from colossus.config import Config
from colossus.config.plans import strategy_options
from colossus.context.grid import RankGrid
from colossus.launch import failure, run_folder
from colossus.launch.causes import CULPRITS, Cause, rank_causes, stop_code
from colossus.launch.failure import FailureRecord
from colossus.launch.outcome import Outcome, ServerFailure
from colossus.launch.recordings import ranges_of, who_is_missing
from colossus.launch.stop import exit_code

DONE, FAILED, USAGE = 0, 1, 2
_WIDTH = 100


def report(outcome: Outcome, config: Config, grid: RankGrid) -> int:
    """Print what is to be said at the end.

    Returns:
        The exit code.
    """
    folder, exits = outcome.folder, dict(outcome.exits)
    records = {record.rank: record for record in failure.read_all(folder)} if folder is not None else {}
    for end in outcome.others:
        exits |= end.exits
        records |= {record.rank: record for record in end.records}
    found = rank_causes(records.values(), exits)
    server = outcome.server or next((end.server for end in outcome.others if end.server is not None), None)
    if server is None and found and found[0].kind not in CULPRITS:
        server = silent_server(records.values(), outcome.endpoints)
    signum = outcome.signum or next((end.signum for end in outcome.others if end.signum), None)
    code = exit_code(signum) if signum is not None else None
    if code is None and server is None and not outcome.gone:
        if exits and all(ended.is_good for ended in exits.values()):
            return DONE
        code = stop_code(found, exits)
        signum = code - 128 if code is not None else None
    if code is not None:
        print(stopped_line(folder, config, signum))
    if server is not None:
        _print(server_block(server, folder))
        return FAILED
    if code is not None:
        return _code_of_stop(outcome, code, found, config, grid)
    if outcome.gone and not (found and found[0].kind in CULPRITS):
        _print(_gone_block(outcome.gone, folder))
        return FAILED
    if not found:
        _print(f"colossus: the run ended with exit codes {exits} and no record in {folder}")
    elif found[0].record is not None and found[0].record.kind == "config":
        _print(f"colossus: {found[0].record.message}")
        return USAGE
    elif found[0].rank in outcome.exits or len(outcome.exits) == grid.world_size:
        _print(failure_block(found, config, grid, folder))
    else:  # the launcher of its node prints the block
        failed = f"{_describe_rank(found[0], grid)} {_describe_failure(found[0])}"
        _print(f"run failed: {failed}; the ranks here stopped because of it")
    return FAILED


def _print(text: str) -> None:
    print(text, file=sys.stderr)


# -- a run that was stopped -----------------------------------------------------------------------------------


def stopped_line(folder: Path | None, config: Config, signum: int | None) -> str:
    """One line on where a stopped run is: read from what it left, so that it is also true after a hard end.

    Args:
        folder: the run folder, None where there is none yet.
    """
    by = f"by {signal.Signals(signum).name} " if signum else ""
    if folder is None:
        return f"stopped {by}before it began"
    row = run_folder.last_metrics(folder)
    if row is None:
        return f"stopped {by}before the first step was complete; run folder {folder}"
    line = f"stopped {by}after step {row['step']}; metrics are in {folder / run_folder.METRICS}"
    if not config.checkpoint.every:
        return line
    latest = _latest(config, folder)
    if latest is None:
        return f"{line}; no checkpoint was saved"
    return f"{line}; the latest checkpoint is {latest}, `colossus launch .. --resume` goes on from there"


def _latest(config: Config, folder: Path) -> Path | None:
    with contextlib.suppress(CheckpointError):
        return find_latest(root_of(config.checkpoint.dir, folder))
    return None


def _code_of_stop(outcome: Outcome, code: int, found: Sequence[Cause], config: Config, grid: RankGrid) -> int:
    """The exit code of a stop; 1, and what was wrong is printed, where checkpoints are saved and the last was not."""
    if not config.checkpoint.every or outcome.folder is None or outcome.is_hurried:
        return code
    # a save that failed because another rank has ended is a victim
    own = [each.record for each in found if each.record is not None and each.record.kind != "communication"]
    unsaved = next((record for record in own if record.type == CheckpointError.__name__), None)
    if unsaved is not None:
        _print(f"colossus: {unsaved.message}")
        return FAILED
    # a rank that is told to stop before its first step ends at once, as one that is stuck does
    culprits = [each for each in found if each.kind in ("death", "stuck") and (not each.record or each.record.step)]
    row, latest = run_folder.last_metrics(outcome.folder), _latest(config, outcome.folder)
    is_of_this_attempt = row is not None and row.get("time", 0.0) >= outcome.started
    saved = read_manifest(latest).step if latest is not None else 0
    if not culprits:
        if row is None or not is_of_this_attempt or saved >= row["step"]:
            return code
        _print(f"colossus: step {row['step']} was the last, and no checkpoint of it was saved")
    if found:
        _print(failure_block(culprits or found, config, grid, outcome.folder))
    return FAILED


# -- a run that failed ----------------------------------------------------------------------------------------


def failure_block(found: Sequence[Cause], config: Config, grid: RankGrid, folder: Path | None) -> str:
    """`block` of a run with this config."""
    options = strategy_options(config)
    records = [cause.record for cause in found if cause.record is not None]
    missing = who_is_missing(folder, records, grid)
    return block(found, grid, folder, replicas_keep_step=options is None or options.replicas_keep_step, missing=missing)


def block(
    causes: Sequence[Cause],
    grid: RankGrid,
    folder: Path | None = None,
    *,
    others: bool = True,
    replicas_keep_step: bool = True,
    missing: Sequence[str] = (),
) -> str:
    """The one block a user reads after a failed run.

    Args:
        causes: of `causes.rank_causes`; at least one.
        folder: the run folder, to be named.
        others: say how the other ranks ended, too.
        replicas_keep_step: all replicas are in the same step: what one says of it is true of all.
        missing: who waits in which collective, and who did not come to it (`recordings.who_is_missing`).
    """
    first, record = causes[0], causes[0].record
    replica = grid.index(first.rank, "data")
    in_step = [each for each in causes if replicas_keep_step or grid.index(each.rank, "data") == replica]
    lines = [f"{_describe_rank(first, grid)} {_describe_failure(first)}"]
    if record is not None and record.traceback:
        lines += ["", *_indent(record.traceback)]
    if record is not None and record.advice:
        lines += ["", *record.advice.splitlines()]
    if missing and first.kind in ("stuck", "communication"):
        lines += ["", "who waits for whom:", *(f"  {line}" for line in missing)]
    if record is not None and record.collectives:
        lines += ["", f"last collectives of rank {first.rank} (newest last):"]
        lines += [f"  {line}" for line in record.collectives[-8:]]
    lines += ["", *(_others(causes, grid.world_size) if others else [])]
    return _framed(f"rank {first.rank}{_at_step(in_step)}", lines, folder)


def _framed(what: str, lines: Sequence[str], folder: Path | None) -> str:
    where = [f"run folder: {folder}"] if folder is not None else []
    return "\n".join(["", f" run failed: {what} ".center(_WIDTH, "="), *lines, *where, "=" * _WIDTH])


def _gone_block(nodes: Sequence[str], folder: Path | None) -> str:
    """What the launchers that are left say when others have gone without a word."""
    lines = [f"{node} gives no sign of life" for node in nodes]
    lines += ["its launcher was killed, or the machine or its network is down; the ranks here were stopped"]
    return _framed(f"{nodes[0].split(' (')[0]} has gone", lines, folder)


def server_block(server: ServerFailure, folder: Path | None) -> str:
    """What is said of a run that a server's end has ended."""
    if server.code is None:
        how = "lives, but gives no sign of it: it hangs, was stopped, or the network is down"
    elif server.code in (0, -signal.SIGTERM, 128 + signal.SIGTERM):
        how = "ended before the workers had, as if it had been told to"
    else:
        how = f"ended with exit code {server.code}" if server.code > 0 else _describe_death(server.code)
    name = f"server {server.index} (host {server.host}, process {server.pid})"
    lines = [f"{name} {how}", server.detail, "Parameters live at the servers, so the workers were stopped."]
    return _framed(f"server {server.index}", lines, folder)


def silent_server(records: Iterable[FailureRecord], endpoints: Sequence[Mapping[str, Any]]) -> ServerFailure | None:
    """The server that the records of workers blame, the earliest first."""
    blaming = [(record.time, record.server, record) for record in records if record.server is not None]
    for _, index, record in sorted(blaming, key=lambda each: each[0]):
        if index < len(endpoints):
            said = f"rank {record.rank} said: {record.message}"
            return ServerFailure(index, endpoints[index]["host"], endpoints[index]["process"], None, said)
    return None


def one_line(record: FailureRecord, folder: Path | None) -> str:
    """What a rank that is not the culprit says when no launcher of ours collects the records."""
    reason = next(iter(record.message.strip().splitlines()), record.type)
    where = f"; its record: {folder / failure.FOLDER / f'rank{record.rank}.json'}" if folder else ""
    if record.kind == "communication":
        return f"rank {record.rank} stopped because another rank went away ({_shorten(reason)}){where}"
    return f"rank {record.rank} failed too: {record.type}: {_shorten(reason)}{where}"


def _describe_rank(cause: Cause, grid: RankGrid) -> str:
    host = f"host {cause.record.host}" if cause.record is not None else ""
    inside = "; ".join(filter(None, (host, grid.where(cause.rank))))
    return f"rank {cause.rank} ({inside})" if inside else f"rank {cause.rank}"


def _describe_failure(cause: Cause) -> str:
    record = cause.record
    if cause.kind == "death":
        assert cause.exit is not None
        return _describe_death(cause.exit.code)
    if cause.kind == "stuck":
        reason = "it was busy or stopped while the other ranks waited for it"
        if record is None:
            return f"answered no signal and had to be killed: {reason}"
        return f"{record.message}: {reason}, here:"
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
    "SIGBUS": "often a full /dev/shm: see `colossus doctor`",
}


def _describe_death(code: int) -> str:
    """How a process ended that was not told to: ``was killed by SIGKILL: ...``"""
    if code == 0:
        return "ended with exit code 0 before its training was through (os._exit(0) in the model or in a library?)"
    if code > 0:
        return f"ended with exit code {code} without an exception (os._exit or a native library?)"
    known = {each.value: each.name for each in signal.Signals}
    name = known.get(-code, f"signal {-code}")
    return f"was killed by {name}{f': {_DEATHS[name]}' if name in _DEATHS else ''}"


def _others(causes: Sequence[Cause], world_size: int) -> list[str]:
    """How the ranks beside the first cause ended."""
    first, rest = causes[0], {cause.rank: cause for cause in causes[1:]}
    lines: list[str] = []
    victims: list[int] = []
    same: list[int] = []
    for rank in range(world_size):
        cause = rest.get(rank)
        record = cause.record if cause is not None else None
        if rank == first.rank:
            continue
        if cause is None or cause.kind == "communication":
            victims.append(rank)
        elif cause.kind == "death":
            lines.append(f"rank {rank} also failed: it {_describe_failure(cause)}")
        elif record and first.record and (record.type, record.message) == (first.record.type, first.record.message):
            same.append(rank)
        elif cause.kind == "stuck" or record is None:
            lines.append(f"rank {rank} did not stop by itself and was ended.")
        else:
            lines.append(f"rank {rank} also failed: {record.type}: {_shorten(record.message)}")
    if same:
        lines.insert(0, f"{ranges_of(same)} raised the same error.")
    if victims:
        verb = "went away" if first.kind != "stuck" else "did not answer"
        lines.append(f"{ranges_of(victims)} stopped because rank {first.rank} {verb}.")
    waited = [cause.record for cause in rest.values() if cause.record is not None and cause.record.is_timeout]
    if first.kind == "stuck" and waited:  # the earliest says what is missing
        lines.append(f"rank {waited[0].rank} said: {_shorten(waited[0].message)}")
    return lines


def _at_step(causes: Sequence[Cause]) -> str:
    """By the first record: a rank that left none was at the same step as the ranks that waited for it."""
    record = next((cause.record for cause in causes if cause.record is not None), None)
    if record is None:
        return ""
    return f" at step {record.step}" if record.step is not None else " before the first step"


def _indent(text: str) -> list[str]:
    return [f"  {line}" for line in text.rstrip().splitlines()]


def _shorten(text: str, most: int = 160) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 3] + "..."
