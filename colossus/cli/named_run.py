"""What a command line calls a checkpoint: a path, or the name of a run."""

from __future__ import annotations

from pathlib import Path

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.folder import find_latest, root_of
from colossus.launch import run_folder

#: for ``--help``
WHAT = "a checkpoint, a folder of checkpoints, a run folder, or the name of a run (the newest of runs/NAME-*)"


def path_of(given: str) -> Path:
    """The path that is meant; of a name that is no path, the newest run of that name that has a checkpoint.

    Raises:
        CheckpointError: when there is neither.
    """
    path = Path(given)
    if path.exists() or path.name != given:
        return path
    runs = run_folder.of_name(given)
    for run in runs:
        if find_latest(root_of(None, run)) is not None:
            return run
    if runs:
        raise CheckpointError(f"{given}: no such path, and no run in runs/{given}-* has a checkpoint")
    raise CheckpointError(f"{given}: no such path, and there is no run in runs/{given}-*")
