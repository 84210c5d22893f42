"""How a rank that fails writes down why, whatever ends it: an exception, a stop that it does not answer, NCCL."""

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

LOOK_SECONDS = 0.5
"""Between two looks at NCCL's watchdogs."""

_OWN_WORDS_SECONDS = 2.0
"""A main thread that has heard of NCCL's error itself may say so: it knows more."""


@dataclass
class RankRun:
    """What a rank knows of its run so far, for its failure record.

    Attributes:
        folder: the run folder, once it is known to be this run's; until then nothing is written into it.
        resume: the checkpoint that the ranks load.
        locks: files whose locks must live as long as this object.
        is_held: the first rank has locked the run folder.
        flush_metrics: writes those that wait to be written, as far as their numbers are there.
        has_failed: the main thread is writing down how.
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
    is_held: bool = False
    flush_metrics: Callable[[], None] = lambda: None
    has_failed: bool = False

    def details(self) -> dict[str, Any]:
        """The fields of a failure record that do not come from the error."""
        log = sys.modules.get("colossus.comm.log")  # not loaded: then there was no collective either
        return {
            "step": self.step,
            "collectives": log.recent() if log is not None else [],
            "progress": log.progress() if log is not None else [],
            "after_signal": self.stop.received,
        }


def fail(run: RankRun, error: BaseException) -> int:
    """Write this rank's record, print what no launcher of ours will print, and return the exit code."""
    run.has_failed = True
    messages, advice = failures.messages_of(error), ""
    if run.config is not None:
        advice = advise(messages, run.config, run.step, run.folder)
    record = failures.of_exception(error, run.rank, **run.details(), advice=advice)
    _write(run, record)
    if record.kind == "communication":
        _write_recording(run)
    if run.stop.is_orphaned():  # nobody else will say so
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
    """The record of a rank that is ended by force: stuck by itself, or waiting for others in a collective of NCCL's."""
    recorder, seconds = _recorder(), run.stop.grace_seconds
    kind: failures.Kind = "communication" if recorder is not None and recorder.has_pending() else "stuck"
    message = f"was told to stop, and waited in a collective for {seconds:g} s more"
    if kind == "stuck":
        message = f"did not reach the end of its step within {seconds:g} s and was ended"
        if run.step is None:
            message = "had not come to its first step when it was ended"
    _write(run, failures.of_thread(thread, run.rank, kind, message, **run.details()))
    if run.folder is not None and not failures.recording_of(run.folder, run.rank).exists():  # else torch has, with more
        _write_recording(run, with_stacks=False)


def watch_nccl(run: RankRun, timeout_seconds: float) -> None:
    """Have a collective that NCCL gives up end in a failure record. Main thread only.

    After a time-out NCCL's watchdog waits a minute and then ends the process by SIGABRT, while the main thread waits
    for the device and hears of nothing. A thread asks the watchdogs, writes down what the rank was doing, and ends the
    process.
    """
    arguments = (run, threading.get_ident(), timeout_seconds)
    threading.Thread(target=_watch_nccl, args=arguments, name="colossus-nccl-watch", daemon=True).start()


def _watch_nccl(run: RankRun, main: int, timeout: float) -> None:
    from colossus.comm import flight_recorder

    while True:
        time.sleep(LOOK_SECONDS)
        found = None
        with contextlib.suppress(RuntimeError, ValueError, KeyError):  # a group is being made or destroyed
            found = flight_recorder.failed_group()
        if found is None:
            continue
        group, error = found
        # groups are described as colossus/1/dataxtensor/0_1_2_3 or mesh_data
        axes = group.split("/")[2] if group.startswith("colossus/") else group.removeprefix("mesh_")
        message = f"timeout: a collective over {axes} did not end within comm.timeout_seconds = {timeout:g}"
        if error != "TIMEOUT":
            time.sleep(_OWN_WORDS_SECONDS)
            message = f"NCCL: a collective over {axes} failed ({error}): the network, or a rank that has ended"
        if run.has_failed or run.stop.received is not None:  # this process is about to end already
            continue
        record = failures.of_thread(main, run.rank, "communication", message, **run.details())
        _write(run, record)
        with contextlib.suppress(Exception):  # whatever is wrong with the metrics, this is the end
            run.flush_metrics()
        _write_recording(run)
        if not run.has_launcher:
            _print(report.one_line(record, run.folder))
        flush()
        os._exit(report.FAILED)


def _recorder() -> Any:
    """Torch's flight recorder, where the ranks talk through NCCL."""
    recorder = sys.modules.get("colossus.comm.flight_recorder")  # not loaded: there is no NCCL
    return recorder if recorder is not None and recorder.is_recording() else None


def _write_recording(run: RankRun, *, with_stacks: bool = True) -> None:
    """What torch has recorded of this rank's collectives."""
    recorder = _recorder()
    if run.folder is not None and recorder is not None:
        with contextlib.suppress(OSError, RuntimeError):
            recorder.write(failures.recording_of(run.folder, run.rank), with_stacks=with_stacks)


def _write(run: RankRun, record: FailureRecord) -> None:
    if run.folder is None or (run.stop.is_orphaned() and not run.is_held):
        return  # the folder may be that of the next attempt already
    try:
        failures.write(run.folder, record)
    except OSError as error:  # the disk is full, say: the launcher looks at a second place, too
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
