"""The ends of a run's ranks, of its nodes, and of an attempt; which rank failed first. No torch.

When one rank dies its neighbours fail within milliseconds with ``Connection closed by peer``, so the first exit that a
launcher sees is often a victim's. Here ends are ordered by their cause, then by time.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from colossus.config import Config

#: the stop signals; SLURM can send the last two some time before a job's end (``--signal=USR1@120``)
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

#: the longest time from a signal to the end of a rank's current step. All ranks are gone within 5 s. A run that saves
#: checkpoints has ``checkpoint.grace_seconds`` instead, and again after each sign of progress.
GRACE_SECONDS = 4.0

Kind = Literal["", "finished", "error", "config", "communication", "stuck"]
Cause = Literal["error", "death", "stuck", "communication"]
_ORDER: tuple[Cause, ...] = ("error", "death", "stuck", "communication")


def exit_code(signum: int) -> int:
    """Return the shell's exit code: 130 after SIGINT, 129 after SIGHUP, 143 after SIGTERM and SLURM's signals."""
    return 128 + (signal.SIGTERM if signum in (signal.SIGUSR1, signal.SIGUSR2) else signum)


_STOP_CODES = {exit_code(signum) for signum in STOP_SIGNALS} | {-signum for signum in STOP_SIGNALS}


@dataclass(frozen=True)
class RankEnd:
    """The end of one rank: what it has written itself, and how its process ended.

    Attributes:
        rank: the global rank.
        code: the exit code of its process, or the negative number of the signal that killed it; None while it runs.
        after_stop: whether it ended after the launcher's stop signal.
        kind: what the rank has written: ``finished`` came to the end of its program, which exit code 0 alone does not
            show; ``error`` is its own; ``config`` is a mistake in the config that came up late; ``communication`` is a
            collective that failed because of another rank; ``stuck`` is a rank that was ended by force; empty if
            nothing.
        type: the name of the error's class.
        message: its message.
        traceback: its traceback, or the stack of a rank that was ended by force.
        step: the step that was running, from 1; None before training.
        host: the name of the rank's host.
        collectives: the rank's last collectives, oldest first.
        progress: the same for a comparison with other ranks (`colossus.comm.log.progress`).
        after_signal: the number of the stop signal that came before the failure, if any.
        advice: lines on what to do, if any.
        rollback: the fields of a `colossus.engine.rollback.Rollback`: the step to which the run is to go back, the
            batches that it is to skip, and the time of the launcher's decision, which is still 0. None where the error
            does not ask for that.
        time: the time of the failure, in seconds since the epoch.
    """

    rank: int
    code: int | None = None
    after_stop: bool = False
    kind: Kind = ""
    type: str = ""
    message: str = ""
    traceback: str = ""
    step: int | None = None
    host: str = ""
    collectives: Sequence[str] = ()
    progress: Sequence[Sequence[Any]] = ()
    after_signal: int | None = None
    advice: str = ""
    rollback: Sequence[Any] | None = None
    time: float = 0.0

    def facts(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, for JSON; short, since a disk may be full."""
        return {name: value for name, value in asdict(self).items() if name == "rank" or value != _NOTHING[name]}

    @property
    def has_record(self) -> bool:
        """Return whether the rank has written why it failed."""
        return self.kind not in ("", "finished")

    @property
    def is_good(self) -> bool:
        return self.code == 0 and (self.after_stop or self.kind != "")

    @property
    def cause(self) -> Cause | None:
        """Return why the rank failed; None where it finished, runs, or was stopped."""
        if self.kind in ("error", "config"):
            # an error after the stop signal most often comes from the stop itself (a loader's process is gone, ...)
            return "error" if self.after_signal is None else "communication"
        if self.kind in ("stuck", "communication"):
            return "stuck" if self.kind == "stuck" else "communication"
        if self.code is None or self.is_good or self.code in _STOP_CODES:
            return None
        if self.after_stop:
            # the launcher ends a rank that does not answer by SIGKILL; any other signal is the rank's own
            if self.code == -signal.SIGKILL:
                return "stuck"
            return "death" if self.code < 0 else None
        return "death"

    @property
    def is_own(self) -> bool:
        """Return whether the rank failed by itself."""
        return self.cause in ("error", "death")

    @property
    def is_of_start_up(self) -> bool:
        """Return whether the rank was stopped before its first step, when it cannot end cleanly yet."""
        return self.kind == "stuck" and self.step is None and self.after_stop

    @property
    def error(self) -> tuple[str, str, int | None]:
        """Return its error by class, message and step, by which an attempt recognizes that of another attempt."""
        return self.type, self.message, self.step

    @property
    def is_timeout(self) -> bool:
        return any(word in self.message.lower() for word in ("timeout", "timed out"))


_NOTHING = asdict(RankEnd(0))


def failed(ends: Iterable[RankEnd]) -> list[RankEnd]:
    """Return the ranks that failed, the most likely culprit first.

    The order is: exceptions of a rank's own, the earliest first; processes that died by themselves (by signals, or
    exits without a record); ranks that had to be ended by force; communication errors.
    """
    causes = [(_ORDER.index(end.cause), end.time, end.rank, end) for end in ends if end.cause is not None]
    return [end for *_, end in sorted(causes, key=lambda cause: cause[:3])]


def stop_code(ends: Iterable[RankEnd]) -> int | None:
    """Return the exit code of a run that a signal to some rank stopped cleanly, or None where anything failed."""
    ends = list(ends)
    causes, stopped = failed(ends), {end.rank: end for end in ends if end.code in _STOP_CODES}
    if causes:  # possibly of ranks whose peer was stopped before it could pass the stop on
        stopped = {rank: end for rank, end in stopped.items() if not end.after_stop}
        if any(end.cause != "communication" and end.rank not in stopped for end in causes):
            return None
    code = next((end.code for end in stopped.values()), None)
    return code if code is None or code > 0 else exit_code(-code)


@dataclass
class NodeEnd:
    """The end of one node's ranks, which its launcher reports to the other nodes.

    Attributes:
        ranks: global rank -> its end.
        signum: the signal that its launcher received, or None.
        server: a text on the death of its parameter server that ended the run, or None.
        is_spare: whether it had no ranks, since the plan needs fewer nodes.
        regroups: whether it has stopped the ranks of all nodes so that new nodes can take part.
        leaves: whether it was stopped and the other nodes go on without it.
        is_hurried: whether a second Ctrl-C has asked to end without a checkpoint.
        late_signum: a stop signal that came when the ranks were being ended already.
    """

    ranks: dict[int, RankEnd] = field(default_factory=dict)
    signum: int | None = None
    server: str | None = None
    is_spare: bool = False
    regroups: bool = False
    leaves: bool = False
    is_hurried: bool = False
    late_signum: int | None = None

    @property
    def is_stopped(self) -> bool:
        """Return whether its launcher has received a stop signal."""
        return self.signum is not None or self.late_signum is not None

    @property
    def is_good(self) -> bool:
        """Return whether all ranks came to the end of their program; a spare node has none."""
        if self.signum is not None or self.server is not None or self.regroups:
            return False
        if not self.ranks and not self.is_spare:
            return False
        return all(end.is_good for end in self.ranks.values())


@dataclass
class AttemptEnd(NodeEnd):
    """The end of an attempt, as the launcher of one node knows it.

    Attributes:
        config: the config of the attempt, with its plan; None before the nodes have met.
        folder: the run folder of all nodes; None before they have agreed on it.
        node: the number of this node; None before it has met others, or without others.
        others: number of another node -> its end, where it has reported that.
        gone: number of another node that is silent -> a text on it.
        unsaved_step: the last step, where this attempt has trained it and no checkpoint has it; else None.
        started: the time at which this attempt began, in seconds since the epoch.
    """

    config: Config | None = None
    folder: Path | None = None
    node: int | None = None
    others: Mapping[int, NodeEnd] = field(default_factory=dict)
    gone: Mapping[int, str] = field(default_factory=dict)
    unsaved_step: int | None = None
    started: float = field(default_factory=time.time)

    @property
    def nodes(self) -> list[NodeEnd]:
        """The ends of all nodes, as far as they are known here, this one first."""
        return [self, *self.others.values()]

    @property
    def all_ranks(self) -> list[RankEnd]:
        """The ends of the ranks of all nodes, as far as they are known here."""
        return [end for node in self.nodes for end in node.ranks.values()]

    @property
    def failed(self) -> list[RankEnd]:
        return failed(self.all_ranks)

    @property
    def dead_server(self) -> str | None:
        return next((node.server for node in self.nodes if node.server is not None), None)

    @property
    def stop_code(self) -> int | None:
        """The exit code of a stop, by a signal to a launcher or to a rank; None where the attempt was not stopped."""
        for node in self.nodes:
            if node.signum and not node.leaves:
                return exit_code(node.signum)
        return stop_code(self.all_ranks) if self.dead_server is None and not self.gone else None
