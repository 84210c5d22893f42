"""The failure record of a rank, whatever ends it: an exception, a stop that it does not answer, or NCCL."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from colossus.checkpoint.errors import CheckpointError
from colossus.config import Config
from colossus.context.grid import RankGrid
from colossus.launch import failures, report
from colossus.launch.advice import advise
from colossus.launch.failures import FailureRecord
from colossus.launch.outcome import rank_causes
from colossus.launch.stop import RankFiles, StopSignals, exit_code

#: the interval at which NCCL's watchdogs are asked
LOOK_SECONDS = 0.5

#: the time in which the main thread may itself report an error of NCCL, of which it knows more
_MAIN_THREAD_SECONDS = 2.0


@dataclass
class RankRun:
    """The state of a rank's run, for its failure record.

    Attributes:
        rank: the global rank.
        stop: the stop signals of this process.
        has_launcher: whether `colossus launch` has started this process.
        folder: the run folder, once this run owns it; nothing is written into it before.
        config: the config, once it is loaded.
        grid: the ranks of its plan.
        step: the running step, from 1; None before the first.
        resume: the checkpoint that the ranks load.
        locks: files whose locks must live as long as this object.
        has_lock: whether this process, as the first rank, has locked the run folder.
        flush_metrics: writes pending metrics whose numbers are there.
        has_failed: whether the main thread is writing its record.
    """

    rank: int
    stop: StopSignals
    has_launcher: bool = True
    folder: Path | None = None
    config: Config | None = None
    grid: RankGrid | None = None
    step: int | None = None
    resume: str | None = None
    locks: tuple[TextIO, ...] = ()
    has_lock: bool = False
    flush_metrics: Callable[[], None] = lambda: None
    has_failed: bool = False

    def details(self) -> dict[str, Any]:
        """Return the fields of a failure record that do not come from the error."""
        log = sys.modules.get("colossus.comm.log")  # where it is not loaded, there was no collective
        return {
            "step": self.step,
            "collectives": log.recent() if log is not None else [],
            "progress": log.progress() if log is not None else [],
            "after_signal": self.stop.received,
        }


def fail(run: RankRun, error: BaseException) -> int:
    """Write this rank's record, print the error where no launcher of ours does, and return the exit code."""
    run.has_failed = True
    messages, advice = failures.messages_of(error), ""
    if run.config is not None:
        advice = advise(messages, run.config, run.step, run.folder)
    record = failures.of_exception(error, run.rank, **run.details(), advice=advice)
    _write(run, record)
    if record.kind == "communication":
        _write_recording(run)
    if run.stop.is_orphaned():  # no launcher reports it
        _print(f"colossus: rank {run.rank}: the launcher is gone; {str(error).partition(chr(10))[0]}")
    is_speaker = not run.has_launcher and run.rank == 0
    if run.stop.received is not None:
        if not isinstance(error, CheckpointError):
            return exit_code(run.stop.received)
        if is_speaker:
            _print(f"colossus: {error}")
    elif record.kind == "config":
        if is_speaker:
            _print(f"colossus: {record.message}")
        return report.USAGE
    elif not run.has_launcher:
        if record.kind == "error" and run.grid is not None and failures.is_first_to_report(run.folder):
            _print(report.block(rank_causes([record], {}), run.grid, run.folder, others=False))
        else:
            _print(report.one_line(record, run.folder))
    return report.FAILED


def write_hard_end(run: RankRun, thread: int) -> None:
    """Write the record of a rank that is ended by force: it is stuck, or waits for others in a collective of NCCL."""
    recorder, seconds = _recorder(), run.stop.grace_seconds
    kind: failures.Kind = "communication" if recorder is not None and recorder.has_pending() else "stuck"
    message = f"was told to stop, and waited in a collective for {seconds:g} s more"
    if kind == "stuck":
        message = f"did not reach the end of its step within {seconds:g} s and was ended"
        if run.step is None:
            message = "had not come to its first step when it was ended"
    _write(run, failures.of_thread(thread, run.rank, kind, message, **run.details()))
    # torch may have written a recording already, with more in it
    if run.folder is not None and not failures.recording_of(run.folder, run.rank).exists():
        _write_recording(run, with_stacks=False)


def watch_nccl(run: RankRun, timeout_seconds: float) -> None:
    """Start a thread that writes a failure record when NCCL gives up a collective. Main thread only.

    After a time-out NCCL's watchdog waits a minute and then ends the process by SIGABRT, while the main thread waits
    for the device and gets no error. The thread asks the watchdogs, records the main thread's stack, and ends the
    process.
    """
    arguments = (run, threading.get_ident(), timeout_seconds)
    threading.Thread(target=_watch_nccl, args=arguments, name="colossus-nccl-watch", daemon=True).start()


def _watch_nccl(run: RankRun, main: int, timeout: float) -> None:
    from colossus.comm import flight_recorder

    while True:
        time.sleep(LOOK_SECONDS)
        failed_group = None
        with contextlib.suppress(RuntimeError, ValueError, KeyError):  # a group is being made or destroyed
            failed_group = flight_recorder.failed_group()
        if failed_group is None:
            continue
        group, error = failed_group
        # a group's description is colossus/1/dataxtensor/0_1_2_3 or mesh_data
        axes = group.split("/")[2] if group.startswith("colossus/") else group.removeprefix("mesh_")
        message = f"timeout: a collective over {axes} did not end within comm.timeout_seconds = {timeout:g}"
        if error != "TIMEOUT":
            time.sleep(_MAIN_THREAD_SECONDS)
            message = f"NCCL: a collective over {axes} failed ({error}): the network, or a rank that has ended"
        if run.has_failed or run.stop.received is not None:  # this process is about to end already
            continue
        record = failures.of_thread(main, run.rank, "communication", message, **run.details())
        _write(run, record)
        with contextlib.suppress(Exception):  # the process ends here in any case
            run.flush_metrics()
        _write_recording(run)
        if not run.has_launcher:
            _print(report.one_line(record, run.folder))
        flush()
        os._exit(report.FAILED)


def _recorder() -> Any:
    """Return the flight recorder's module where the ranks communicate through NCCL, else None."""
    recorder = sys.modules.get("colossus.comm.flight_recorder")  # it is loaded where ranks use NCCL
    return recorder if recorder is not None and recorder.is_recording() else None


def _write_recording(run: RankRun, *, with_stacks: bool = True) -> None:
    """Write torch's recording of this rank's collectives, where there is one."""
    recorder = _recorder()
    if run.folder is not None and recorder is not None:
        with contextlib.suppress(OSError, RuntimeError):
            recorder.write(failures.recording_of(run.folder, run.rank), with_stacks=with_stacks)


def _write(run: RankRun, record: FailureRecord) -> None:
    if run.folder is None or (run.stop.is_orphaned() and not run.has_lock):
        return  # the next attempt may own the folder already
    try:
        failures.write(run.folder, record)
    except OSError as error:  # on a full disk, say, the launcher reads a second folder, too
        try:
            failures.write(RankFiles().folder, record)
        except OSError:
            _print(f"rank {run.rank}: no failure record ({error}):\n{record.traceback}")


def _print(text: str) -> None:
    print(text, file=sys.stderr)


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
