"""Where a run writes and from which checkpoint it goes on, decided before a process starts. No torch.

`choose` looks, `Origin.take` makes and locks the folders: the launcher does both, under torchrun and srun rank 0 does.
"""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TextIO

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.folder import checkpoints, find_latest, locate, root_of
from colossus.checkpoint.manifest import read_manifest
from colossus.checkpoint.weight_sources import find_weights, manifest_of
from colossus.config import Config, ConfigError
from colossus.config.user_path import user_path
from colossus.launch import run_folder
from colossus.launch.checks import check_weights

AUTO = "auto"
#: in a folder of checkpoints that is not in the run folder: which that is
_RUN_FOLDER = "run-folder"


class RunStart(NamedTuple):
    """The folder of a run that begins, its own until the ``locks`` are closed, and what the ranks load: "auto", the
    latest checkpoint; a folder; None where they begin at the first step.
    """

    folder: Path
    resume: str | None
    locks: tuple[TextIO, ...]


@dataclass(frozen=True)
class Origin:
    """Where a run writes, and from which checkpoint it goes on. Nothing is made or locked yet.

    Attributes:
        folder: the run folder, None for a new one of the config's name.
        checkpoint: None where the run begins at the first step.
        is_own: the folder was used by an earlier attempt of the same run.
        is_latest: the checkpoint is the latest of the run that goes on; False of one that a user has named.
    """

    config: Config
    folder: Path | None
    checkpoint: Path | None = None
    is_own: bool = False
    is_latest: bool = False

    def find_weights(self) -> Path | None:
        """The checkpoint whose weights the run takes before its first step; None where it takes none.

        Raises:
            ConfigError: when it is no whole checkpoint.
        """
        wanted = self.config.checkpoint.weights
        if wanted is None or self.checkpoint is not None:
            return None
        try:
            found = find_weights(wanted.path)
            if wanted.average is not None:
                manifest_of(found, wanted.average)
            return found
        except CheckpointError as error:
            raise ConfigError(f"checkpoint.weights = {wanted.path!r}: {error}") from None

    def check(self) -> None:
        """Refuse the folders of other runs, and weights that are not there, or not those of the model.

        Raises:
            ConfigError: naming the folder.
        """
        if (found := self.find_weights()) is not None:
            check_weights(self.config, found)
        if self.folder is not None:
            run_folder.check(self.folder, is_own=self.is_own)
        self._check_checkpoints()

    def _check_checkpoints(self) -> None:
        """Refuse the checkpoints of a run that is not resumed: this one would remove them."""
        section = self.config.checkpoint
        if not section.every or (self.folder is None and section.dir is None):
            return
        root = root_of(section.dir, self.folder or Path())
        goes_on = self.checkpoint is not None and self.checkpoint.parent.resolve() == root.resolve()
        if not goes_on and (held := checkpoints(root)):
            raise ConfigError(
                f"checkpoint.dir {root}: holds {len(held)} checkpoint{'s' * (len(held) > 1)} of another run already "
                f"(the newest is {held[-1].name}), which this run would replace and remove; --resume goes on with "
                f"it, else give another folder, or move it away"
            )

    def take(self) -> RunStart:
        """Make and lock the folders; metrics of an attempt that left no checkpoint are renamed.

        Raises:
            ConfigError: when they cannot be made, or are another run's; when there are no weights.
        """
        self.find_weights()
        self._check_checkpoints()
        section, locks, root = self.config.checkpoint, [], None
        try:
            if section.every and section.dir is not None:
                root = root_of(section.dir, Path())
                locks.append(run_folder.take(root, "checkpoint.dir"))
                run_folder.require_room(root, f"checkpoint.dir {root}")
            folder = self.folder or run_folder.default_folder(self.config.name or "run", make=True)
            locks.append(run_folder.prepare(folder, is_own=self.is_own))
            if root is not None:
                (root / _RUN_FOLDER).write_text(f"{folder.resolve()}\n")
            if self.is_own and not self.is_latest and run_folder.has_metrics(folder):
                lost = (folder / run_folder.METRICS).replace(folder / "metrics.lost.jsonl")
                said = f"{folder}: an attempt has left no checkpoint; its metrics are in {lost}, the run begins anew"
                print(f"colossus: {said}", file=sys.stderr)
        except BaseException:
            for lock in locks:
                lock.close()
            raise
        resume = AUTO if self.is_latest else None
        if resume is None and self.checkpoint is not None:
            resume = os.path.abspath(user_path(section.resume or self.checkpoint))
        return RunStart(folder, resume, tuple(locks))

    def describe(self) -> str:
        """What is resumed, for ``--dry-run``."""
        if self.checkpoint is None:
            return "nothing: begins at step 1"
        manifest = read_manifest(self.checkpoint)
        return f"step {manifest.step} of {self.checkpoint}, saved under {manifest.plan.get('text', 'an unknown plan')}"


def choose(config: Config, *, run_dir: str | None = None, resume: bool = False) -> Origin:
    """Where a launch begins.

    ``--resume`` and ``checkpoint.resume = "auto"`` look for the latest checkpoint: of ``run_dir``, else in
    ``checkpoint.dir``, else of the newest run of this name that has one. Without ``--resume`` a folder in
    ``checkpoint.resume`` begins a run of its own.

    Args:
        run_dir: of ``--run-dir``.
        resume: whether ``--resume`` was given: without a checkpoint there is nothing to be done.

    Raises:
        ConfigError: when there is nothing to resume, or what there is is not whole.
    """
    wanted = config.checkpoint.resume
    given = Path(run_dir) if run_dir is not None else None
    if not resume and wanted != AUTO:
        return Origin(config, given, _named(wanted))
    found, folder, is_own, name = None, None, True, config.name or "run"
    if config.checkpoint.dir is not None:
        root = root_of(config.checkpoint.dir, Path())
        used, looked = _run_folder_of(root), f"{root} (checkpoint.dir)"
        found, folder = _latest(root), given or used
        is_own = used is not None and folder is not None and used.resolve() == folder.resolve()
    else:
        looked = str(root_of(None, given)) if given is not None else f"{Path('runs') / name}-*"
        for folder in [given] if given is not None else run_folder.of_name(name):
            found = _latest(root_of(None, folder))
            if found is not None:
                break
    if found is not None:
        return Origin(config, folder, found, is_own=is_own, is_latest=True)
    if resume:
        raise ConfigError(f"--resume: there is no checkpoint in {looked}; without --resume a run begins at step 1")
    return Origin(config, given, is_own=given is not None and (given / run_folder.LOCK).exists())


def _run_folder_of(root: Path) -> Path | None:
    """The run folder of the run that has last saved here, None where it is not known or not there any more."""
    with contextlib.suppress(OSError, ValueError):
        known = (root / _RUN_FOLDER).read_text().strip()
        return Path(known) if known and os.path.isdir(known) else None
    return None


def _latest(root: Path) -> Path | None:
    try:
        return find_latest(root)
    except CheckpointError as error:
        raise ConfigError(f"nothing can be resumed: {error}") from None


def _named(wanted: str | None) -> Path | None:
    """The checkpoint that ``checkpoint.resume`` names."""
    if wanted in (None, AUTO):
        return None
    try:
        found = locate(Path(wanted or ""))
        if not read_manifest(found).is_weights_only:
            return found
    except CheckpointError as error:
        raise ConfigError(f"checkpoint.resume = {wanted!r}: {error}") from None
    raise ConfigError(
        f"checkpoint.resume = {wanted!r}: {found} has weights only, nothing can go on from it; "
        f"checkpoint.weights={wanted} begins a run with them"
    )
