"""What a user hears of a run that was stopped, read from what it has left. No torch."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.folder import find_latest, root_of
from colossus.checkpoint.manifest import read_manifest
from colossus.config import Config
from colossus.config.plans import strategy_options
from colossus.context.grid import RankGrid
from colossus.launch import causes, failure, run_folder
from colossus.launch.recordings import who_is_missing


def stopped_line(folder: Path | None, config: Config, signum: int | None) -> str:
    """One line on where a stopped run is: read from what it left, so that it is also true after a hard end.

    Args:
        folder: the run folder, None where there is none yet.
    """
    by = f"by {signal.Signals(signum).name} " if signum else ""
    if folder is None:
        return f"stopped {by}before it began"
    row = run_folder.last_metrics(folder)
    if row is None:
        return f"stopped {by}before the first step was complete; run folder {folder}"
    line = f"stopped {by}after step {row['step']}; metrics are in {folder / run_folder.METRICS}"
    if not config.checkpoint.every:
        return line
    with contextlib.suppress(CheckpointError):
        found = find_latest(root_of(config.checkpoint.dir, folder))
        if found is not None:
            return f"{line}; the latest checkpoint is {found}, `colossus launch .. --resume` goes on from there"
    return f"{line}; no checkpoint was saved"


def failure_block(found: Sequence[causes.Cause], config: Config, grid: RankGrid, folder: Path | None) -> str:
    """`causes.block` of a run with this config."""
    options = strategy_options(config)
    in_step = options is None or options.replicas_keep_step
    records = [cause.record for cause in found if cause.record is not None]
    missing = who_is_missing(folder, records, grid)
    return causes.block(list(found), grid, folder, replicas_keep_step=in_step, missing=missing)


def code_of_stop(code: int, found: Sequence[causes.Cause], config: Config, grid: RankGrid, folder: Path | None) -> int:
    """The exit code of a stop; 1, and what was wrong is printed, where checkpoints are saved and the last was not.

    Args:
        code: of the signal.
        found: the ranks that failed.
    """
    if not config.checkpoint.every or folder is None:
        return code
    culprits = [cause for cause in found if cause.kind in ("death", "stuck") and not _was_loading(cause)]
    if culprits:
        print(failure_block(culprits, config, grid, folder), file=sys.stderr)
        return 1
    row = run_folder.last_metrics(folder)
    if row is None or row.get("time", 0.0) < failure.STARTED:  # of an attempt before: this one has made no step
        return code
    step = 0
    with contextlib.suppress(CheckpointError):
        latest = find_latest(root_of(config.checkpoint.dir, folder))
        step = read_manifest(latest).step if latest is not None else 0
    if step >= row["step"]:
        return code
    print(f"colossus: step {row['step']} was the last, and no checkpoint of it was saved", file=sys.stderr)
    if found:
        print(failure_block(found, config, grid, folder), file=sys.stderr)
    return 1


def _was_loading(cause: causes.Cause) -> bool:
    """Whether it ended as ranks do that are told to stop before their first step: at once."""
    return cause.kind == "stuck" and cause.record is not None and cause.record.step is None
