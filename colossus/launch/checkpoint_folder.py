"""The folder of a run's checkpoints: that it is not another run's, and that it can be written to. No torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from colossus.checkpoint.folder import checkpoints, remove_left_over, root_of
from colossus.config import ConfigError
from colossus.config.training import Checkpoint
from colossus.launch import run_folder

#: in a folder of checkpoints that is not in the run folder: which that is
_RUN_FOLDER = "run-folder"


def check(section: Checkpoint, folder: Path, checkpoint: Path | None) -> None:
    """Refuse the checkpoints of a run that is not resumed: this one would remove them, and ``latest`` would move.

    Args:
        folder: of the run.
        checkpoint: that it resumes from.

    Raises:
        ConfigError: naming the folder.
    """
    root = root_of(section.dir, folder)
    if section.every:
        _check_usable(root)
    if not section.every or (checkpoint is not None and checkpoint.parent.resolve() == root.resolve()):
        return
    held = checkpoints(root)
    if held:
        raise ConfigError(
            f"checkpoint.dir {root}: holds {len(held)} checkpoint{'s' * (len(held) > 1)} of another run already (the "
            f"newest is {held[-1].name}), which this run would replace and remove; --resume goes on with it, "
            f"else give another folder, or move it away"
        )


@contextmanager
def take(section: Checkpoint, folder: Path, checkpoint: Path | None) -> Iterator[None]:
    """Make the folder of checkpoints, lock it, and remove what a run that was killed has left unfinished there.

    Raises:
        ConfigError: when it cannot be made or written to, or is another run's.
    """
    if not section.every:
        yield
        return
    root = root_of(section.dir, folder)
    _check_usable(root)
    with contextlib.ExitStack() as locks:
        is_new = not root.exists()
        if root.resolve() != folder.resolve():
            locks.enter_context(run_folder.take(root, "checkpoint.dir" if section.dir else "folder of checkpoints"))
        if is_new:
            locks.enter_context(run_folder.removed_if_refused(root))
        check(section, folder, checkpoint)
        remove_left_over(root)
        if section.dir is not None:
            try:
                (root / _RUN_FOLDER).write_text(f"{folder.resolve()}\n")
            except OSError as error:
                raise ConfigError(f"checkpoint.dir {root}: cannot be written to: {error.strerror or error}") from None
        yield


def _check_usable(root: Path) -> None:
    """Refuse a folder of checkpoints that cannot be made."""
    above = root
    while not above.exists() and above != above.parent:
        above = above.parent
    if not above.is_dir():
        what = "is a file, not a folder" if above == root else f"cannot be made: Not a directory: {above}"
        raise ConfigError(f"checkpoint.dir {root}: {what}")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"checkpoint.dir {root}: cannot be written to: no permission for {above}")


def run_folder_of(root: Path) -> Path | None:
    """The run folder of the run that has last saved here, None where it is not known or not there any more."""
    with contextlib.suppress(OSError, UnicodeDecodeError, ValueError):
        known = (root / _RUN_FOLDER).read_text().strip()
        if known and os.path.isdir(known):
            return Path(known)
    return None
