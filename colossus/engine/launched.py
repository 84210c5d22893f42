"""The start of a run as its launcher decides it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Launched:
    """The start of a run as its launcher decides it, the same on all ranks.

    Attributes:
        folder: the folder in which the launcher keeps the files of this run.
        resume: the checkpoint that `Checkpoints.resume` loads: "auto" (the latest of this run), a folder, or None.
        on_progress: called from any thread as a sign of life: a part of a checkpoint was written or read, or another
            replica for which this one waits has gone on.
        is_restart: whether the launcher has restarted the ranks: the run first looks for its newest whole save, in the
            memory of the hosts and on the disk.
        rollback: on a restart, the latest step to resume from (None: any; later saves are removed with the branch that
            the run leaves); the number of batches to leave out after it (None: those up to that of the next step); the
            time of that decision, in seconds since the epoch, which is saved, so that they are left out once.
    """

    folder: Path
    resume: str | None
    on_progress: Callable[[], None]
    is_restart: bool = False
    rollback: tuple[int | None, int | None, float] = (None, 0, 0.0)
