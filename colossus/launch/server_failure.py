"""How a parameter server failed, and what the user reads of it. No torch."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from colossus.launch.causes import WIDTH, describe_death
from colossus.launch.failure import FailureRecord

LOGS = "logs"
"""In the run folder: what servers print."""

_LAST_LINES, _MOST_BYTES = 12, 16384


@dataclass(frozen=True)
class ServerFailure:
    """A server that ended by itself, or that workers have waited for in vain.

    Attributes:
        code: exit code; negative is the number of the signal that killed it; None while it lives.
        said: its last lines, or what a worker says of it that lives.
        log: its log, as its own node knows it.
    """

    index: int
    host: str
    pid: int
    code: int | None
    said: str = ""
    log: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> ServerFailure:
        return cls(**json.loads(text))

    @property
    def name(self) -> str:
        return f"server {self.index} (host {self.host}, process {self.pid})"

    @property
    def how(self) -> str:
        """``was killed by SIGKILL: ...``"""
        if self.code is None:
            return "lives, but gives no sign of it: it hangs, was stopped, or the network is down"
        if self.code in (0, -signal.SIGTERM, 128 + signal.SIGTERM):
            return "ended before the workers had, as if it had been told to"
        if self.code > 0:
            return f"ended with exit code {self.code}"
        return describe_death(self.code)

    def block(self, folder: Path | None) -> str:
        """The one block of a run that a server's end has ended."""
        title = f" run failed: server {self.index} "
        lines = ["", title.center(WIDTH, "="), f"{self.name} {self.how}"]
        if self.said:
            lines += ["", "its last lines:" if self.code is not None else "a worker said:"]
            lines += [f"  {line}" for line in self.said.splitlines()]
        lines += ["", "Parameters live at the servers, so the workers were stopped."]
        if self.log:
            lines.append(f"log: {self.log}")
        if folder is not None:
            lines.append(f"run folder: {folder}")
        return "\n".join([*lines, "=" * WIDTH])


def log_of(folder: Path, index: int) -> Path:
    return folder / LOGS / f"server{index}.log"


def last_lines(log: Path) -> str:
    """What a server has printed last."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _MOST_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-_LAST_LINES:])


def silent_server(records: Iterable[FailureRecord], endpoints: Sequence[Mapping[str, Any]]) -> ServerFailure | None:
    """The server that the records of workers blame, the earliest first."""
    blaming = [record for record in records if record.server is not None and record.server < len(endpoints)]
    if not blaming:
        return None
    record = min(blaming, key=lambda record: record.time)
    assert record.server is not None
    endpoint, said = endpoints[record.server], f"rank {record.rank}: {record.message}"
    return ServerFailure(record.server, endpoint["host"], endpoint["process"], None, said)
