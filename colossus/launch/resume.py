"""The choice of the folder and the checkpoint of a run, before a process starts. No torch.

`choose` only looks; `Origin.take` makes and locks the folders. The launcher calls both; under torchrun and srun, rank 0
does.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from colossus.arithmetic import counted
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.folder import checkpoints, find_latest, locate, root_of
from colossus.checkpoint.manifest import read_manifest
from colossus.checkpoint.weight_sources import find_weights, manifest_of
from colossus.config import Config, ConfigError, Named, model_options
from colossus.config.sections import Weights
from colossus.config.user_path import user_path
from colossus.launch import run_folder
from colossus.launch.checks import check_weights
from colossus.models.tuning_options import options_of_reference

AUTO = "auto"
#: file in a folder of checkpoints outside of the run folder, with the path of the run folder
_RUN_FOLDER = "run-folder"


class RunStart(NamedTuple):
    """The folder of a run that begins, and the checkpoint that its ranks load.

    Attributes:
        folder: the run folder, which the run owns until ``locks`` are closed.
        resume: "auto" for the latest checkpoint, or a folder; None where the ranks begin at the first step.
        locks: the open lock files.
    """

    folder: Path
    resume: str | None
    locks: tuple[TextIO, ...]


@dataclass(frozen=True)
class Origin:
    """The folder and the checkpoint of a run that is to begin; neither is made or locked yet.

    Attributes:
        config: the config of the run.
        folder: the run folder; None for a new one with the config's name.
        checkpoint: the checkpoint from which it resumes; None where it begins at the first step.
        is_own: whether an earlier attempt of the same run has used the folder.
        is_latest: whether the checkpoint is the latest of the run that is resumed, not one that the user has named.
    """

    config: Config
    folder: Path | None
    checkpoint: Path | None = None
    is_own: bool = False
    is_latest: bool = False

    def find_weights(self) -> Path | None:
        """Return the checkpoint whose weights the run loads before its first step, or None.

        Raises:
            ConfigError: it is not complete.
        """
        section = self.config.checkpoint.weights
        if section is None or self.checkpoint is not None:
            return None
        try:
            weights = find_weights(section.path)
            if section.average is not None:
                manifest_of(weights, section.average)
            return weights
        except CheckpointError as error:
            raise ConfigError(f"checkpoint.weights = {section.path!r}: {error}") from None

    def check(self) -> None:
        """Raise ConfigError for folders of other runs, and for weights that are missing or do not fit the model."""
        if (weights := self.find_weights()) is not None:
            check_weights(self.config, weights)
        _check_reference(self.config)
        if self.folder is not None:
            run_folder.check(self.folder, is_own=self.is_own)
        self._check_checkpoints()

    def _check_checkpoints(self) -> None:
        """Raise ConfigError where the folder has checkpoints of another run, which this one would remove."""
        section = self.config.checkpoint
        if not section.every or (self.folder is None and section.dir is None):
            return
        root = root_of(section.dir, self.folder or Path())
        goes_on = self.checkpoint is not None and self.checkpoint.parent.resolve() == root.resolve()
        if not goes_on and (others := checkpoints(root)):
            raise ConfigError(
                f"checkpoint.dir {root}: holds {counted(len(others), 'checkpoint')} of another run "
                f"already (the newest is {others[-1].name}), which this run would replace and remove; --resume "
                f"continues it, else give another folder, or move it away"
            )

    def take(self) -> RunStart:
        """Make and lock the folders, and rename the metrics of an attempt that left no checkpoint.

        Raises:
            ConfigError: the folders cannot be made or belong to another run, or the weights are missing.
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
                lost = (folder / run_folder.METRICS).replace(_lost_metrics(folder))
                text = f"{folder}: an attempt has left no checkpoint; its metrics are in {lost}, the run begins anew"
                print(f"colossus: {text}", file=sys.stderr)
        except BaseException:
            for lock in locks:
                lock.close()
            raise
        resume = AUTO if self.is_latest else None
        if resume is None and self.checkpoint is not None:
            resume = os.path.abspath(user_path(section.resume or self.checkpoint))
        return RunStart(folder, resume, tuple(locks))

    def describe(self) -> str:
        """Return a text on the checkpoint from which the run resumes, for ``--dry-run``."""
        if self.checkpoint is None:
            return "nothing: begins at step 1"
        manifest = read_manifest(self.checkpoint)
        return f"step {manifest.step} of {self.checkpoint}, saved under {manifest.plan.get('text', 'an unknown plan')}"


def _check_reference(config: Config) -> None:
    """Raise ConfigError where the weights that ``model.reference`` names are missing or do not fit it."""
    options: Any = model_options(config)
    wanted = getattr(options, "reference", None)
    path = None if wanted is None else wanted.weights or wanted.path
    if config.model is None or wanted is None or path is None:
        return
    try:
        folder = find_weights(path)
    except CheckpointError as error:
        raise ConfigError(f"model.reference = {path!r}: {error}") from None
    if wanted.path is None:  # a folder with a model of its own fits
        model = Named(**{**options_of_reference(options), "type": config.model.type})
        checkpoint = config.checkpoint.model_copy(update={"weights": Weights(path=path)})
        of_reference = config.model_copy(update={"model": model, "checkpoint": checkpoint})
        check_weights(of_reference, folder, "model.reference.weights")


def _lost_metrics(folder: Path) -> Path:
    """Return the name for the metrics of an attempt that left no checkpoint: the first that is free."""
    names = itertools.chain(["metrics.lost.jsonl"], (f"metrics.lost-{number}.jsonl" for number in itertools.count(2)))
    return next(path for name in names if not (path := folder / name).exists())


def choose(config: Config, *, run_dir: str | None = None, resume: bool = False) -> Origin:
    """Choose the folder and the checkpoint of a run.

    ``--resume`` and ``checkpoint.resume = "auto"`` look for the latest checkpoint in ``run_dir``, or in
    ``checkpoint.dir``, or in the newest run of this name that has one. Without ``--resume``, a folder in
    ``checkpoint.resume`` begins a run of its own.

    Args:
        config: the config of the run.
        run_dir: the folder of ``--run-dir``.
        resume: whether ``--resume`` was given, which needs a checkpoint.

    Raises:
        ConfigError: there is nothing to resume, or the checkpoint is not complete.
    """
    setting = config.checkpoint.resume
    run_path = Path(run_dir) if run_dir is not None else None
    if not resume and setting != AUTO:
        return Origin(config, run_path, _named_checkpoint(setting))
    latest, folder, is_own, name = None, None, True, config.name or "run"
    if config.checkpoint.dir is not None:
        root = root_of(config.checkpoint.dir, Path())
        last_folder, searched = _run_folder_of(root), f"{root} (checkpoint.dir)"
        latest, folder = _latest(root), run_path or last_folder
        is_own = last_folder is not None and folder is not None and last_folder.resolve() == folder.resolve()
    else:
        searched = str(root_of(None, run_path)) if run_path is not None else f"{Path('runs') / name}-*"
        for folder in [run_path] if run_path is not None else run_folder.of_name(name):
            latest = _latest(root_of(None, folder))
            if latest is not None:
                break
    if latest is not None:
        return Origin(config, folder, latest, is_own=is_own, is_latest=True)
    if resume:
        raise ConfigError(f"--resume: there is no checkpoint in {searched}; without --resume a run begins at step 1")
    return Origin(config, run_path, is_own=run_path is not None and (run_path / run_folder.LOCK).exists())


def _run_folder_of(root: Path) -> Path | None:
    """Return the run folder of the last run that saved here, or None where it is unknown or gone."""
    with contextlib.suppress(OSError, ValueError):
        path = (root / _RUN_FOLDER).read_text().strip()
        return Path(path) if path and os.path.isdir(path) else None
    return None


def _latest(root: Path) -> Path | None:
    try:
        return find_latest(root)
    except CheckpointError as error:
        raise ConfigError(f"nothing can be resumed: {error}") from None


def _named_checkpoint(setting: str | None) -> Path | None:
    """Return the checkpoint that ``checkpoint.resume`` names, or None."""
    if setting in (None, AUTO):
        return None
    try:
        checkpoint = locate(Path(setting or ""))
        if not read_manifest(checkpoint).is_weights_only:
            return checkpoint
    except CheckpointError as error:
        raise ConfigError(f"checkpoint.resume = {setting!r}: {error}") from None
    raise ConfigError(
        f"checkpoint.resume = {setting!r}: {checkpoint} has weights only, so no run can continue from it; "
        f"checkpoint.weights={setting} begins a run with them"
    )
