"""What one rank writes down when it fails: ``failures/rank<N>.json`` in the run folder."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from colossus.config import ConfigError

Kind = Literal["error", "config", "communication", "stuck"]

FOLDER = "failures"
#: followed by the rank: names of the flight recorder's files below `FOLDER`, as torch makes them
RECORDING = "flight_recorder_rank_"
_REPORTED = "reported"

_MACHINERY = tuple(
    str(Path(__file__).parents[1] / room) + os.sep for room in ("cli", "doctor", "launch", "monitor", "verify")
)

# From the messages of torch's backends when a peer is gone or silent. A rank that raises one of them is a victim.
_COMMUNICATION_ERRORS = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "connectFullMesh failed",
    "Timed out waiting",
    "did not come to collective",
    "did not come to the servers",
    "did not send the",
    "did not take the",
    "did not send its message",
    ") has gone: ",
    "timeout: not all replicas",
    "Socket Timeout",
    "wait timeout",
    "Broken pipe",
    "recvValue failed",
    "sendBytes failed",
    "failed to recv, got 0 bytes",
    "NCCL communicator was aborted",
    "ncclRemoteError",
    "ncclSystemError",
    "remote process exited or there was a network error",
    "Watchdog caught collective operation timeout",
    "Some NCCL operations have failed or timed out",
)


@dataclass(frozen=True)
class FailureRecord:
    """How and where one rank failed.

    Attributes:
        kind: ``error`` is this rank's own; ``config`` a mistake in the config found late; ``communication`` a
            collective that failed because of another rank; ``stuck`` was ended by force, with the stack it had.
        step: the step that was running, counted from 1; None before training.
        collectives: the rank's last collectives, oldest first.
        progress: the same for comparison with those of other ranks (`colossus.comm.log.progress`).
        advice: what to do about it, where that is known.
        culprit: the rank that an error names which all ranks raise; None where they know of none.
        server: index of the parameter server that has gone or is silent, where that is why.
        after_signal: number of the stop signal that came before the failure, if any.
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
    culprit: int | None = None
    server: int | None = None
    after_signal: int | None = None
    advice: str = ""
    time: float = field(default_factory=time.time)

    @property
    def is_timeout(self) -> bool:
        return any(word in self.message.lower() for word in ("timeout", "timed out"))


def kind_of(error: BaseException) -> Kind:
    """The kind of an error; a communication error anywhere in its chain of causes decides."""
    if isinstance(error, ConfigError):
        return "config"
    for cause in _chain(error):
        # Python's own ConnectionError is an OSError: a user's loader talking to some server, not our collectives
        if isinstance(cause, RuntimeError) and any(word in str(cause) for word in _COMMUNICATION_ERRORS):
            return "communication"
    return "error" if _server_of(error) is None else "communication"


def _server_of(error: BaseException) -> int | None:
    """The parameter server that an error blames."""
    messages = sys.modules.get("colossus.server.frames")  # not loaded: then there are no servers
    if messages is None:
        return None
    return next((cause.index for cause in _chain(error) if isinstance(cause, messages.ServerGone)), None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and its causes."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def messages_of(error: BaseException) -> list[str]:
    """Of an error and its causes."""
    return [f"{type(cause).__name__}: {cause}" for cause in _chain(error)]


def of_exception(error: BaseException, rank: int, **details: Any) -> FailureRecord:
    """The record of an exception; ``details`` are further fields. Our own outermost frames are left out."""
    culprit = getattr(error, "culprit", None)
    what = type(error).__name__, str(error), _users_traceback(error)
    return FailureRecord(rank, kind_of(error), *what, culprit=culprit, server=_server_of(error), **details)


def of_stuck_rank(thread_id: int, seconds: float, rank: int, **details: Any) -> FailureRecord:
    """The record of a rank whose thread ``thread_id`` did not come back within ``seconds`` of a stop signal."""
    message = f"did not reach the end of its step within {seconds:g} s and was ended"
    if details.get("step") is None:
        message = "had not come to its first step when it was ended"
    return FailureRecord(rank, "stuck", "Stuck", message, _stack_of(thread_id), **details)


def of_lost_collective(thread_id: int, message: str, rank: int, **details: Any) -> FailureRecord:
    """The record of a rank that waits in a collective which will not end, with its thread's stack."""
    return FailureRecord(rank, "communication", "DistBackendError", message, _stack_of(thread_id), **details)


def _stack_of(thread_id: int) -> str:
    frames = list(traceback.extract_stack(sys._current_frames().get(thread_id)))
    while any(_is_ours(frame.filename) for frame in frames):
        frames.pop(0)
    return "".join(traceback.format_list(frames))


def write(folder: Path, record: FailureRecord) -> Path:
    """Write the record below the run folder; readers see all of it or nothing."""
    target = folder / FOLDER / f"rank{record.rank}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps(asdict(record), indent=2) + "\n")
    draft.replace(target)
    return target


def read_all(folder: Path) -> list[FailureRecord]:
    """Every readable record below the run folder, by rank."""
    records = []
    for path in sorted((folder / FOLDER).glob("rank*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            records.append(FailureRecord(**json.loads(path.read_text())))
    return sorted(records, key=lambda record: record.rank)


def recording_of(folder: Path, rank: int) -> Path:
    """Where what torch's flight recorder has of a rank lies."""
    return folder / FOLDER / f"{RECORDING}{rank}"


def clear(folder: Path) -> None:
    """Remove the records of an earlier attempt in the same folder."""
    for pattern in ("rank*.json", f"{RECORDING}*", _REPORTED):
        for path in (folder / FOLDER).glob(pattern):
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not there, or something of the user's is in it
        (folder / FOLDER).rmdir()


def is_first_to_report(folder: Path | None) -> bool:
    """Whether no other rank of this run has printed its failure yet (ranks that share the folder agree)."""
    if folder is None:
        return True
    reported = folder / FOLDER / _REPORTED
    try:
        reported.parent.mkdir(parents=True, exist_ok=True)
        reported.open("x").close()
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def _is_ours(filename: str) -> bool:
    """Whether a frame is of what surrounds a run, and so says nothing about why it failed."""
    return filename.startswith(_MACHINERY)


def _users_traceback(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))
