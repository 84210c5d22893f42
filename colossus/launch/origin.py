"""Where a run writes and from which checkpoint it goes on, decided before a process starts. No torch.

`choose` looks, `Origin.take` makes and locks the folders: the launcher does both, under torchrun and srun rank 0 does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.folder import find_latest, locate, root_of
from colossus.checkpoint.manifest import read_manifest
from colossus.checkpoint.sources import find_weights
from colossus.config import Config, ConfigError
from colossus.launch import checkpoint_folder, run_folder, slurm
from colossus.launch.weights_check import check_weights

AUTO = "auto"


@dataclass(frozen=True)
class Taken:
    """The folders of a run that begins; they are its own until ``locks`` is closed.

    Attributes:
        resume: what the ranks load: "auto", the latest checkpoint; a folder; None where they begin at the first step.
    """

    folder: Path
    resume: str | None
    locks: ExitStack


@dataclass(frozen=True)
class Origin:
    """Where a run writes, and from which checkpoint it goes on. Nothing is made or locked yet.

    Attributes:
        folder: the run folder, None for a new one of the config's name.
        checkpoint: None where the run begins at the first step.
        is_own: the folder was used by an earlier attempt of the same run.
        latest_in: the folder of checkpoints of which ``checkpoint`` is the latest, if that is why it was chosen.
        note: what the user should know of the choice.
    """

    config: Config
    folder: Path | None
    checkpoint: Path | None = None
    is_own: bool = False
    latest_in: Path | None = None
    launch: slurm.Launch | None = None
    note: str | None = None

    def find_weights(self) -> Path | None:
        """The checkpoint whose weights the run takes before its first step; None where it takes none.

        Raises:
            ConfigError: when it is no whole checkpoint.
        """
        wanted = self.config.checkpoint.weights
        if wanted is None or self.checkpoint is not None:
            return None
        try:
            return find_weights(wanted.path)
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
            run_folder.check_usable(self.folder) if self.is_own else run_folder.check_unused(self.folder)
            checkpoint_folder.check(self.config.checkpoint, self.folder, self.checkpoint)
        elif self.config.checkpoint.dir is not None:
            checkpoint_folder.check(self.config.checkpoint, Path(), self.checkpoint)

    def take(self) -> Taken:
        """Make and lock the folders; what an attempt has written that left no checkpoint is put aside.

        Raises:
            ConfigError: when they cannot be made, or are another run's; when there are no weights.
        """
        self.find_weights()
        if self.note is not None:
            print(f"colossus: {self.note}", file=sys.stderr)
        folder = self.folder
        with ExitStack() as locks:
            is_new = folder is None or not folder.exists()
            if folder is None:
                folder = run_folder.make_default_folder(self.config.name or "run")
            locks.enter_context(run_folder.prepare(folder, is_own=self.is_own))
            if is_new:
                locks.enter_context(run_folder.removed_if_refused(folder))
            checkpoint = self.checkpoint
            if self.latest_in is not None:  # the run that held it until now may have saved another
                checkpoint = _latest(self.latest_in) or checkpoint
            locks.enter_context(checkpoint_folder.take(self.config.checkpoint, folder, checkpoint))
            if self.is_own and self.latest_in is None:
                run_folder.put_aside(folder)
            if self.launch is not None:
                self.launch.record(folder)
            resume = AUTO if self.latest_in is not None else None
            if resume is None and checkpoint is not None:
                resume = os.path.abspath(os.path.expanduser(self.config.checkpoint.resume or checkpoint))
            return Taken(folder, resume, locks.pop_all())
        raise AssertionError("nothing above is suppressed")

    def describe(self) -> str:
        """What is resumed, for ``--dry-run``."""
        if self.checkpoint is None:
            return "nothing: begins at step 1"
        manifest = read_manifest(self.checkpoint)
        plan = manifest.plan.get("text", "an unknown plan")
        return f"step {manifest.step} of {self.checkpoint}, saved under {plan}"


def choose(
    config: Config,
    config_path: str,
    overrides: Sequence[str],
    *,
    run_dir: str | None = None,
    resume: bool = False,
    environ: Mapping[str, str] | None = None,
) -> Origin:
    """Where a launch begins.

    A job that SLURM has requeued goes on in its own run folder, from the latest checkpoint there, or anew.
    Otherwise ``--resume`` and ``checkpoint.resume = "auto"`` look for the latest checkpoint: of ``run_dir``, else in
    ``checkpoint.dir``, else of the newest run of this name that has one. A folder in ``checkpoint.resume`` begins a
    run of its own.

    Args:
        run_dir: of ``--run-dir``.
        resume: whether ``--resume`` was given: without a checkpoint there is nothing to be done.

    Raises:
        ConfigError: when there is nothing to resume, or what there is is not whole.
    """
    wanted = config.checkpoint.resume
    given = Path(run_dir) if run_dir is not None else None
    environ = os.environ if environ is None else environ
    launch = slurm.Launch.of(environ, config_path, overrides)
    if resume and wanted not in (None, AUTO) and any(text.startswith("checkpoint.resume=") for text in overrides):
        raise ConfigError(
            f"--resume goes on with the latest checkpoint of the run, checkpoint.resume={wanted} begins a new run from "
            f"that one: give one of them"
        )
    note = None
    if launch is not None and slurm.is_requeued(environ):
        folders = [given] if given is not None else run_folder.of_name(config.name or "run")
        own = launch.folder_of(folders)
        if own is None:
            note = (
                f"SLURM has requeued job {launch.job_id}, but no run folder is that of an attempt of it with this "
                f"config file and these overrides"
            )
        else:
            own_root = root_of(config.checkpoint.dir, own)
            found = _latest(own_root)
            if found is not None:
                return Origin(config, own, found, is_own=True, latest_in=own_root, launch=launch)
            return Origin(config, own, _given(wanted), is_own=True, launch=launch)
    if not resume and wanted != AUTO:
        return Origin(config, given, _given(wanted), launch=launch, note=note)
    found, folder, root, looked = _search(config, given)
    if found is not None:
        is_own = folder is not None and folder.exists() and _belongs(config, folder)
        return Origin(config, folder, found, is_own=is_own, latest_in=root, launch=launch)
    if resume:
        raise ConfigError(f"--resume: there is no checkpoint in {looked}; without --resume a run begins at step 1")
    return Origin(config, given, is_own=given is not None and run_folder.was_left(given), launch=launch, note=note)


def _search(config: Config, given: Path | None) -> tuple[Path | None, Path | None, Path | None, str]:
    """(the latest checkpoint, its run folder, its folder of checkpoints, where it was looked for)."""
    if config.checkpoint.dir is not None:
        root = root_of(config.checkpoint.dir, Path())
        used = checkpoint_folder.run_folder_of(root)
        if given is not None and not _belongs(config, given):
            if used is not None:
                raise ConfigError(
                    f"--run-dir {given}: the checkpoints in checkpoint.dir {root} are those of the run in {used}: "
                    f"give that folder, or none; checkpoint.resume={root} and another checkpoint.dir begin a new run"
                )
            if run_folder.has_metrics(given):
                raise ConfigError(
                    f"--run-dir {given}: holds metrics, and nothing says that the checkpoints in checkpoint.dir {root} "
                    f"are of the same run: give another folder, or move the metrics away"
                )
        return _latest(root), given if given is not None else used, root, f"{root} (checkpoint.dir)"
    name = config.name or "run"
    for candidate in [given] if given is not None else run_folder.of_name(name):
        root = root_of(None, candidate)
        found = _latest(root)
        if found is not None:
            return found, candidate, root, str(root)
    looked = str(root_of(None, given)) if given is not None else f"{Path('runs') / name}-*"
    return None, None, None, looked


def _belongs(config: Config, folder: Path) -> bool:
    """Whether the run in this folder is the one that has last saved where the config says."""
    if config.checkpoint.dir is None:
        return True
    used = checkpoint_folder.run_folder_of(Path(config.checkpoint.dir))
    return used is not None and used.resolve() == folder.resolve()


def _latest(root: Path) -> Path | None:
    try:
        return find_latest(root)
    except CheckpointError as error:
        raise ConfigError(f"nothing can be resumed: {error}") from None


def _given(wanted: str | None) -> Path | None:
    """The checkpoint that ``checkpoint.resume`` names."""
    return None if wanted in (None, AUTO) else _located("checkpoint.resume", wanted or "")


def _located(key: str, wanted: str) -> Path:
    try:
        found = locate(Path(wanted))
        if not read_manifest(found).is_weights_only:
            return found
    except CheckpointError as error:
        raise ConfigError(f"{key} = {wanted!r}: {error}") from None
    raise ConfigError(
        f"{key} = {wanted!r}: {found} has weights only, nothing can go on from it; checkpoint.weights={wanted} begins "
        f"a run with them"
    )
