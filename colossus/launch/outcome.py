"""How the ranks of a run ended, as their launchers know it. No torch."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from colossus.launch.failure import FailureRecord


@dataclass(frozen=True)
class RankExit:
    """How a rank's process ended.

    Attributes:
        code: exit code; negative is the number of the signal that killed it.
        after_stop: it ended after the launcher's stop signal.
        is_finished: whether it came to the end of its program; with exit code 0 only the file it left says so.
    """

    code: int
    after_stop: bool = False
    is_finished: bool = True

    @property
    def is_early(self) -> bool:
        """Whether it exited with 0 before it had finished."""
        return self.code == 0 and not self.after_stop and not self.is_finished

    @property
    def is_good(self) -> bool:
        return self.code == 0 and not self.is_early


@dataclass(frozen=True)
class ServerFailure:
    """A parameter server that ended by itself, or that workers have waited for in vain.

    Attributes:
        code: exit code; negative is the number of the signal that killed it; None while it lives.
        detail: where its log is, or what a worker says of it.
    """

    index: int
    host: str
    pid: int
    code: int | None
    detail: str = ""


@dataclass(frozen=True)
class NodeEnd:
    """How the ranks of one node ended.

    Attributes:
        exits: global rank -> how its process ended.
        signum: the signal its launcher received, None when there was none.
        records: of its ranks that failed.
        server: its parameter server that has failed.
    """

    node: int
    exits: dict[int, RankExit] = field(default_factory=dict)
    signum: int | None = None
    records: Sequence[FailureRecord] = ()
    server: ServerFailure | None = None

    @property
    def is_good(self) -> bool:
        """Whether there were ranks, and all came to the end of their program."""
        if self.signum is not None or self.server is not None or not self.exits:
            return False
        return all(ended.is_good for ended in self.exits.values())

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> NodeEnd:
        read = json.loads(text)
        read["exits"] = {int(rank): RankExit(**ended) for rank, ended in read["exits"].items()}
        read["records"] = [FailureRecord(**record) for record in read["records"]]
        read["server"] = ServerFailure(**read["server"]) if read["server"] is not None else None
        return cls(**read)


@dataclass
class Outcome:
    """How a run ended, as the launcher of one node knows it.

    Attributes:
        folder: the run folder all nodes agreed on, None before they have.
        exits: of this node's ranks: global rank -> how its process ended.
        signum: the signal the launcher itself received, None when the ranks ended otherwise.
        is_hurried: a second Ctrl-C has asked to end without a checkpoint.
        server: the parameter server of this node whose failure has ended the run.
        others: how the ranks of other nodes ended, as far as they have said.
        gone: the nodes that give no sign of life any more, in words.
        endpoints: of all parameter servers.
        started: when this launcher did, in seconds since the epoch.
    """

    folder: Path | None = None
    exits: dict[int, RankExit] = field(default_factory=dict)
    signum: int | None = None
    is_hurried: bool = False
    server: ServerFailure | None = None
    others: Sequence[NodeEnd] = ()
    gone: Sequence[str] = ()
    endpoints: Sequence[Mapping[str, Any]] = ()
    started: float = field(default_factory=time.time)
