"""How a rank that fails writes down why, whatever ends it: an exception, a stop that it does not answer, NCCL."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path

from colossus.checkpoint.errors import CheckpointError
from colossus.config import Config
from colossus.launch import causes, failure, finished, nccl_watch, recordings
from colossus.launch.out_of_memory import advise, is_out_of_memory
from colossus.launch.rank_run import RankRun
from colossus.launch.stop import exit_code


def watch_nccl(run: RankRun, config: Config) -> None:
    """Have a collective that hangs end in a failure record (`nccl_watch`). Main thread only."""
    thread = threading.get_ident()

    def give_up(message: str) -> None:
        record = failure.of_lost_collective(thread, message, run.rank, **run.details())
        _write(run, record)
        with contextlib.suppress(Exception):  # whatever is wrong with the metrics, this is the end
            if run.flush_metrics is not None:
                run.flush_metrics()
        _write_recording(run, with_stacks=True)
        if not run.has_launcher:
            print(causes.one_line(record, run.folder), file=sys.stderr)
        flush()
        os._exit(1)

    nccl_watch.watch(
        give_up, lambda: run.has_failed or run.stop.received is not None, timeout_seconds=config.comm.timeout_seconds
    )


def say_where_to_record(folder: Path) -> None:
    """torch records by itself when the watchdog of another rank asks for it."""
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder / failure.FOLDER / failure.RECORDING))


def write_hard_end(run: RankRun, thread: int) -> None:
    """The record of a rank that is ended by force: stuck by itself, or waiting for others in a collective of NCCL's."""
    recorder = sys.modules.get("colossus.comm.flight_recorder")  # not loaded: there is no NCCL
    if recorder is not None and recorder.is_recording() and recorder.has_pending():
        message = f"was told to stop, and waited in a collective for {run.stop.grace_seconds:g} s more"
        record = failure.of_lost_collective(thread, message, run.rank, **run.details())
    else:
        record = failure.of_stuck_rank(thread, run.stop.grace_seconds, run.rank, **run.details())
    _write(run, record)
    if run.folder is not None and not recordings.path_of(run.folder, run.rank).exists():  # else torch has, with more
        _write_recording(run, with_stacks=False)


def _write_recording(run: RankRun, *, with_stacks: bool) -> None:
    """What torch has recorded of this rank's collectives, for comparison with the other ranks'."""
    recorder = sys.modules.get("colossus.comm.flight_recorder")
    if run.folder is None or recorder is None or not recorder.is_recording():
        return
    with contextlib.suppress(OSError, RuntimeError):
        recorder.write(recordings.path_of(run.folder, run.rank), with_stacks=with_stacks)


def fail(run: RankRun, error: BaseException) -> int:
    """Write this rank's record, print what no launcher of ours will print, and return the exit code."""
    run.has_failed = True
    record = failure.of_exception(error, run.rank, **run.details(), advice=_advice(run, error))
    _write(run, record)
    if record.kind == "communication":
        _write_recording(run, with_stacks=True)
    if run.stop.is_orphaned():  # nobody else will say so
        finished.abandon()
        print(f"colossus: rank {run.rank}: the launcher is gone; {str(error).partition(chr(10))[0]}", file=sys.stderr)
    if run.stop.received is not None:
        if not isinstance(error, CheckpointError):
            return exit_code(run.stop.received)
        if not run.has_launcher and run.rank == 0:
            print(f"colossus: {error}", file=sys.stderr)
        return 1
    if record.kind == "config":
        if not run.has_launcher and run.rank == 0:
            print(f"colossus: {record.message}", file=sys.stderr)
        return 2
    if not run.has_launcher:
        if record.kind == "error" and run.grid is not None and failure.is_first_to_report(run.folder):
            found = causes.rank_causes([record], {})
            print(causes.block(found, run.grid, run.folder, others=False), file=sys.stderr)
        else:
            print(causes.one_line(record, run.folder), file=sys.stderr)
    return 1


def _advice(run: RankRun, error: BaseException) -> str:
    messages = failure.messages_of(error)
    if run.config is None or not is_out_of_memory(messages):
        return ""
    return advise(run.config, " ".join(messages), run.step)


def _write(run: RankRun, record: failure.FailureRecord) -> None:
    if run.stop.is_orphaned() and run.held is None:
        return  # the folder may be that of the next attempt already
    if run.folder is not None:
        try:
            failure.write(run.folder, record)
        except OSError as error:
            print(f"rank {run.rank}: no failure record ({error}):\n{record.traceback}", file=sys.stderr)


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
