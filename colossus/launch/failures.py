"""The record that a rank writes when it fails: ``failures/rank<N>.json`` in the run folder. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from colossus.comm.peer_gone import causes, is_of_a_peer
from colossus.config import ConfigError

Kind = Literal["error", "config", "communication", "stuck"]

FOLDER = "failures"
#: names of the flight recorder's files below `FOLDER`, which torch completes with the rank
RECORDING = "flight_recorder_rank_"
_REPORTED = "reported"

#: folders of code around a run, whose frames say nothing about a failure
_MACHINERY = tuple(
    str(Path(__file__).parents[1] / room) + os.sep for room in ("cli", "doctor", "launch", "monitor", "verify")
)


@dataclass(frozen=True)
class FailureRecord:
    """The failure of one rank.

    Attributes:
        rank: the global rank.
        kind: ``error`` is this rank's own; ``config`` is a mistake in the config that came up late; ``communication``
            is a collective that failed because of another rank; ``stuck`` is a rank that was ended by force.
        type: the name of the error's class.
        message: its message.
        traceback: its traceback, or the stack of a rank that was ended by force.
        step: the step that was running, from 1; None before training.
        host: the name of the rank's host.
        collectives: the rank's last collectives, oldest first.
        progress: the same for a comparison with other ranks (`colossus.comm.log.progress`).
        after_signal: the number of the stop signal that came before the failure, if any.
        advice: lines on what to do, if any.
        rollback: the step to which the run is to go back, and the batches that it is to skip (`loss_spikes.Rollback`);
            None where the error does not ask for that.
        time: seconds since the epoch.
    """

    rank: int
    kind: Kind
    type: str
    message: str
    traceback: str
    step: int | None = None
    host: str = field(default_factory=socket.gethostname)
    collectives: Sequence[str] = ()
    progress: Sequence[Sequence[Any]] = ()
    after_signal: int | None = None
    advice: str = ""
    rollback: Sequence[Any] | None = None
    time: float = field(default_factory=time.time)

    @property
    def is_timeout(self) -> bool:
        return any(word in self.message.lower() for word in ("timeout", "timed out"))


def kind_of(error: BaseException) -> Kind:
    """Return the kind of an error: ``communication`` where another rank has gone, by its type or that of a cause."""
    if isinstance(error, ConfigError):
        return "config"
    return "communication" if is_of_a_peer(error) else "error"


def messages_of(error: BaseException) -> list[str]:
    """Return the messages of an error and its causes."""
    return [f"{type(cause).__name__}: {cause}" for cause in causes(error)]


def of_exception(error: BaseException, rank: int, **details: Any) -> FailureRecord:
    """Return the record of an exception, without our own outermost frames; ``details`` are further fields."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_MACHINERY):
            break
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    what = type(error).__name__, str(error), text
    return FailureRecord(rank, kind_of(error), *what, rollback=getattr(error, "rollback", None), **details)


def of_thread(thread_id: int, rank: int, kind: Kind, message: str, **details: Any) -> FailureRecord:
    """Return the record of a rank that is ended by force, with the stack of its thread ``thread_id``."""
    frames = list(traceback.extract_stack(sys._current_frames().get(thread_id)))
    while any(frame.filename.startswith(_MACHINERY) for frame in frames):
        frames.pop(0)
    name = "Stuck" if kind == "stuck" else "DistBackendError"
    return FailureRecord(rank, kind, name, message, "".join(traceback.format_list(frames)), **details)


def write(folder: Path, record: FailureRecord) -> Path:
    """Write the record below the run folder; readers see all of it or nothing."""
    target = folder / FOLDER / f"rank{record.rank}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps(asdict(record), indent=2) + "\n")
    draft.replace(target)
    return target


def read_all(folder: Path) -> list[FailureRecord]:
    """Return every readable record below the run folder, by rank."""
    records = []
    for path in sorted((folder / FOLDER).glob("rank*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            records.append(FailureRecord(**json.loads(path.read_text())))
    return sorted(records, key=lambda record: record.rank)


def recording_of(folder: Path, rank: int) -> Path:
    """Return the path of a rank's file of torch's flight recorder."""
    return folder / FOLDER / f"{RECORDING}{rank}"


def clear(folder: Path) -> None:
    """Remove the records of an earlier attempt in the same folder."""
    for pattern in ("rank*.json", f"{RECORDING}*", _REPORTED):
        for path in (folder / FOLDER).glob(pattern):
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it is missing, or has files of the user
        (folder / FOLDER).rmdir()


def is_first_to_report(folder: Path | None) -> bool:
    """Return whether no other rank of this run has printed its failure yet (ranks that share the folder agree)."""
    if folder is not None:
        with contextlib.suppress(OSError):
            (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        try:
            (folder / FOLDER / _REPORTED).open("x").close()
        except FileExistsError:
            return False
        except OSError:
            pass
    return True
