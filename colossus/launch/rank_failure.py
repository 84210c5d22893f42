"""The end of a rank as it writes it down, whatever ends it: an exception, a stop that it does not answer, or NCCL."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from colossus.checkpoint.errors import CheckpointError
from colossus.comm.peer_gone import causes, is_of_a_peer
from colossus.config import Config, ConfigError
from colossus.context.grid import RankGrid
from colossus.engine.rollback import Rollback
from colossus.launch import attempt_log, report
from colossus.launch.advice import advise
from colossus.launch.decide import FAILED, USAGE
from colossus.launch.ends import Kind, RankEnd, exit_code
from colossus.launch.local_processes import RankFiles
from colossus.launch.recordings import recording_of
from colossus.launch.stop import StopSignals

#: the interval at which NCCL's watchdogs are asked
LOOK_SECONDS = 0.5

#: folders of code around a run, whose frames say nothing about a failure
_MACHINERY = tuple(
    str(Path(__file__).parents[1] / room) + os.sep for room in ("cli", "doctor", "launch", "monitor", "verify")
)

#: the time in which the main thread may itself report an error of NCCL, of which it knows more
_MAIN_THREAD_SECONDS = 2.0


@dataclass
class RankRun:
    """The state of a rank's run, for the record of its end.

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
    flush_metrics: Callable[[], None] = lambda: None
    has_failed: bool = False

    def details(self) -> dict[str, Any]:
        """Return the fields of the rank's end that do not come from the error."""
        log = sys.modules.get("colossus.comm.log")  # where it is not loaded, there was no collective
        return {
            "step": self.step,
            "collectives": log.recent() if log is not None else [],
            "progress": log.progress() if log is not None else [],
            "after_signal": self.stop.received,
        }


# -- records --------------------------------------------------------------------------------------------------


def kind_of(error: BaseException) -> Kind:
    """Return the kind of an error: ``communication`` where another rank has gone, by its type or that of a cause."""
    if isinstance(error, ConfigError):
        return "config"
    return "communication" if is_of_a_peer(error) else "error"


def messages_of(error: BaseException) -> list[str]:
    """Return the messages of an error and its causes."""
    return [f"{type(cause).__name__}: {cause}" for cause in causes(error)]


def of_exception(error: BaseException, rank: int, **details: Any) -> RankEnd:
    """Return the record of an exception, without our own outermost frames; ``details`` are further fields."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_MACHINERY):
            break
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    rollback = getattr(error, "rollback", None)
    if not isinstance(rollback, Rollback):  # an error of the user may have such an attribute, too
        rollback = None
    return _end(rank, kind_of(error), type(error).__name__, str(error), text, rollback=rollback, **details)


def _end(rank: int, kind: Kind, name: str, message: str, text: str, **details: Any) -> RankEnd:
    facts: dict[str, Any] = {"host": socket.gethostname(), "time": time.time()} | details
    return RankEnd(rank, kind=kind, type=name, message=message, traceback=text, **facts)


def of_thread(thread_id: int, rank: int, kind: Kind, message: str, **details: Any) -> RankEnd:
    """Return the record of a rank that is ended by force, with the stack of its thread ``thread_id``."""
    frames = list(traceback.extract_stack(sys._current_frames().get(thread_id)))
    while any(frame.filename.startswith(_MACHINERY) for frame in frames):
        frames.pop(0)
    name = "Stuck" if kind == "stuck" else "DistBackendError"
    return _end(rank, kind, name, message, "".join(traceback.format_list(frames)), **details)


# -- the end --------------------------------------------------------------------------------------------------


def fail(run: RankRun, error: BaseException) -> int:
    """Write this rank's end, print the error where no launcher of ours does, and return the exit code."""
    run.has_failed = True
    messages, advice = messages_of(error), ""
    if run.config is not None:
        advice = advise(messages, run.config, run.step, run.folder)
    end = of_exception(error, run.rank, **run.details(), advice=advice)
    is_first = _write(run, end)
    if end.kind == "communication":
        _write_recording(run)
    if run.stop.is_orphaned():  # no launcher reports it
        _print(f"colossus: rank {run.rank}: the launcher is gone; {str(error).partition(chr(10))[0]}")
    is_speaker = not run.has_launcher and run.rank == 0
    if run.stop.received is not None:
        if not isinstance(error, CheckpointError):
            return exit_code(run.stop.received)
        if is_speaker:
            _print(f"colossus: {error}")
    elif end.kind == "config":
        if is_speaker:
            _print(f"colossus: {end.message}")
        return USAGE
    elif not run.has_launcher:
        if end.kind == "error" and run.grid is not None and is_first:
            _print(report.block([end], run.grid, run.folder, others=False))
        else:
            _print(report.one_line(end, run.folder))
    return FAILED


def write_hard_end(run: RankRun, thread: int) -> None:
    """Write the end of a rank that is ended by force: it is stuck, or waits for others in a collective of NCCL."""
    recorder, seconds = _recorder(), run.stop.grace_seconds
    kind: Kind = "communication" if recorder is not None and recorder.has_pending() else "stuck"
    message = f"was told to stop, and waited in a collective for {seconds:g} s more"
    if kind == "stuck":
        message = f"did not reach the end of its step within {seconds:g} s and was ended"
        if run.step is None:
            message = "had not come to its first step when it was ended"
    _write(run, of_thread(thread, run.rank, kind, message, **run.details()))
    # torch may have written a recording already, with more in it
    if run.folder is not None and not recording_of(run.folder, run.rank).exists():
        _write_recording(run, with_stacks=False)


def watch_nccl(run: RankRun, timeout_seconds: float) -> None:
    """Start a thread that writes the rank's end when NCCL gives up a collective. Main thread only.

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
        end = of_thread(main, run.rank, "communication", message, **run.details())
        _write(run, end)
        with contextlib.suppress(Exception):  # the process ends here in any case
            run.flush_metrics()
        _write_recording(run)
        if not run.has_launcher:
            _print(report.one_line(end, run.folder))
        flush()
        os._exit(FAILED)


def _recorder() -> Any:
    """Return the flight recorder's module where the ranks communicate through NCCL, else None."""
    recorder = sys.modules.get("colossus.comm.flight_recorder")  # it is loaded where ranks use NCCL
    return recorder if recorder is not None and recorder.is_recording() else None


def _write_recording(run: RankRun, *, with_stacks: bool = True) -> None:
    """Write torch's recording of this rank's collectives, where there is one."""
    recorder = _recorder()
    if run.folder is not None and recorder is not None:
        with contextlib.suppress(OSError, RuntimeError):
            recorder.write(recording_of(run.folder, run.rank), with_stacks=with_stacks)


def _write(run: RankRun, end: RankEnd) -> bool:
    """Write the end for the launcher, or without one for the other ranks; return whether no culprit was before it."""
    if not run.has_launcher:
        return run.folder is None or attempt_log.record_failure(run.folder, end)
    try:
        RankFiles().write_end(end)
    except OSError as error:
        _print(f"rank {run.rank}: no record of its failure ({error}):\n{end.traceback}")
    return True


def _print(text: str) -> None:
    print(text, file=sys.stderr)


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
