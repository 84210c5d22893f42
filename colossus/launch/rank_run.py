"""What a rank knows of its run so far. No torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from colossus.config import Config
from colossus.context.grid import RankGrid
from colossus.launch.origin import Taken
from colossus.launch.stop import StopSignals


@dataclass
class RankRun:
    """The state of this rank's run so far, for its failure record.

    Attributes:
        given: the run folder that was asked for.
        folder: the same when it is known to be this run's; until then nothing is written into it.
        taken: locks that must live as long as this object, where no launcher of ours holds them.
        held: the lock of the first rank, which tells the next launcher that a rank has outlived this one.
        flush_metrics: writes those that wait to be written, as far as their numbers are there.
        has_failed: the main thread is writing down how.
    """

    rank: int
    stop: StopSignals
    given: Path | None
    has_launcher: bool
    folder: Path | None = None
    config: Config | None = None
    grid: RankGrid | None = None
    engine: Any = None
    hooks: list[Any] = field(default_factory=list)
    step: int | None = None
    resume: str | None = None
    taken: Taken | None = None
    held: TextIO | None = None
    flush_metrics: Callable[[], None] | None = None
    has_failed: bool = False

    def details(self) -> dict[str, Any]:
        """The fields of a failure record that do not come from the error."""
        log = sys.modules.get("colossus.comm.log")  # not loaded: then there was no collective either
        return {
            "step": self.step,
            "coordinates": self.grid.coordinates(self.rank) if self.grid is not None else {},
            "collectives": log.recent() if log is not None else [],
            "progress": log.progress() if log is not None else [],
            "after_signal": self.stop.received,
        }
