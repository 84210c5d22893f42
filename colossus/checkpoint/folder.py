"""Folders of checkpoints: their names, the latest one, how a checkpoint is put in place, which are removed. No torch.

    checkpoints/
        latest                  text: the name of the newest complete checkpoint
        best                    text: the names of those with the best metric, the best first, if a hook watches one
        step-00000100/          manifest.json, rank-00000.safetensors, ...
        step-00000200.tmp-...   being written, or unfinished by a run that was killed

A checkpoint is complete when it has its name: everything is written and flushed under a temporary one.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import stat
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from colossus.checkpoint.durable import flush, remove, write_flushed
from colossus.checkpoint.errors import CheckpointError, DamagedCheckpoint
from colossus.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from colossus.config.user_path import user_path

log = logging.getLogger("colossus.checkpoint")

LATEST, BEST = "latest", "best"
#: environment variable with a folder in the host's memory, if the launcher has made one
MEMORY = "COLOSSUS_MEMORY"
#: folder of checkpoints in a run folder, unless the config names another
IN_RUN_FOLDER = "checkpoints"
_NAME = re.compile(r"step-(\d{8,})(\.replaced)?")
_LEFT_OVER = re.compile(r"step-\d{8,}\.(tmp|deleted)-.*")


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def file_of(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def absolute(path: Path | str) -> Path:
    """Return a user's path as an absolute one, which outlives a change of working directory; ``~`` is the home."""
    return Path(os.path.abspath(user_path(path)))


def root_of(checkpoint_dir: str | None, run_folder: Path) -> Path:
    """Return the folder of a run's checkpoints: ``checkpoint.dir``, or one in its run folder."""
    return user_path(checkpoint_dir) if checkpoint_dir is not None else run_folder / IN_RUN_FOLDER


def temporary(root: Path, step: int, token: str) -> Path:
    """Return the folder in which a checkpoint is written before it is complete."""
    return root / f"{name_of(step)}.tmp-{token}"


def checkpoint_steps(root: Path) -> dict[Path, int]:
    """Return path -> step of the paths with the name of a checkpoint, by name. Their content is not read."""
    try:
        names = sorted(os.listdir(root))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be read: {error.strerror or error}") from None
    return {root / name: int(matched[1]) for name in names if (matched := _NAME.fullmatch(name))}


def checkpoints(root: Path) -> list[Path]:
    """Return the folders in ``root`` with the name and the manifest of a checkpoint, the oldest first.

    Their files are not checked. They are ordered by the time of saving in their manifests: steps would not do, since a
    run may have resumed from an earlier step, nor times of files, which a copy of a folder need not keep.
    """
    dated = []
    for path, step in checkpoint_steps(root).items():
        try:
            dated.append((_saved_at(path, (path / MANIFEST).stat().st_mtime_ns), step, path))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    return [path for _, _, path in sorted(dated)]


@lru_cache(maxsize=1024)
def _saved_at(path: Path, modified_ns: int) -> float:
    """Return when a checkpoint was saved, in seconds since 1970; the time of its file if the manifest is damaged."""
    try:
        return read_manifest(path).saved_at
    except DamagedCheckpoint:
        return modified_ns / 1e9


def find_latest(
    root: Path, damaged: dict[Path, CheckpointError] | None = None, until: int | None = None
) -> Path | None:
    """Return the checkpoint that ``latest`` names, if its files exist in full size; else the newest such checkpoint.

    A warning names each one that is skipped. None where the folder has no checkpoint.

    Args:
        root: folder of checkpoints.
        damaged: checkpoints that are known to be damaged; those that are found are added.
        until: latest step; checkpoints of later steps are skipped.

    Raises:
        DamagedCheckpoint: naming the newest, if none is whole.
        CheckpointError: if one cannot be read, or is of another version: such a one is never skipped.
    """
    damaged = {} if damaged is None else damaged
    steps = checkpoint_steps(root)
    wanted = [path for path in _newest_first(root) if until is None or steps[path] <= until]
    for path in wanted:
        if path in damaged:
            continue
        try:
            require_files(path)
        except DamagedCheckpoint as error:
            damaged[path] = error
            log.warning("%s", error)
            continue
        if path != wanted[0]:
            log.warning("%s is damaged: taking %s instead", wanted[0], path)
        return path
    if wanted:
        raise damaged[wanted[0]]
    return None


def _newest_first(root: Path) -> list[Path]:
    """Return the checkpoint that ``latest`` names, then all others, the newest first, then those without a manifest."""
    paths = checkpoints(root)[::-1]
    paths += [path for path in reversed(checkpoint_steps(root)) if path not in paths]
    names = _names_in(root / LATEST)
    if not names:
        return paths
    name = names[0]
    if root / name in paths:
        paths.remove(root / name)
        return [root / name, *paths]
    log.warning("%s names %r, which does not exist%s", root / LATEST, name, ": taking the newest" if paths else "")
    return paths


def _names_in(pointer: Path) -> list[str]:
    """Return the names in a file like ``latest``; none where there is no such file."""
    try:
        return pointer.read_text().split()
    except (OSError, UnicodeDecodeError):
        return []


def locate(path: Path, damaged: dict[Path, CheckpointError] | None = None) -> Path:
    """Return the checkpoint folder that a user means.

    Args:
        path: a checkpoint, a folder of checkpoints, a run folder, or a file ``latest`` or ``best``, of which the first
            checkpoint that exists is taken.
        damaged: see `find_latest`.
    """
    path = user_path(path)
    try:
        if path.name in (LATEST, BEST):
            path = next((target for name in _names_in(path) if (target := path.parent / name).is_dir()), path)
        if (path / MANIFEST).exists():
            if damaged is not None and path in damaged:
                raise damaged[path]
            require_files(path)
            return path
        for root in (path, path / IN_RUN_FOLDER):
            latest = find_latest(root, damaged)
            if latest is not None:
                return latest
        if not path.exists():
            raise CheckpointError(f"{path}: there is no such folder")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    raise CheckpointError(
        f"{path}: is neither a checkpoint of colossus (no {MANIFEST}), nor a folder of checkpoints, nor a run folder. "
        f"Files of torch.save and torch.distributed.checkpoint are not read: load them in a script of your own, then "
        f"call colossus.checkpoint.load_full_state_dict; a model folder of Hugging Face is for checkpoint.weights"
    )


def require_files(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint after checking that all its files exist in full size.

    Raises:
        DamagedCheckpoint: if the manifest or a file is missing or truncated.
        CheckpointError: if a file cannot be read, or the checkpoint is of another version.
    """
    manifest = read_manifest(folder)
    for name, file in manifest.files.items():
        try:
            status = (folder / name).stat()
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{folder}: {name} is missing; take another checkpoint") from None
        except OSError as error:
            raise CheckpointError(f"{folder / name}: cannot be read: {error.strerror or error}") from None
        if not os.access(folder / name, os.R_OK, effective_ids=os.access in os.supports_effective_ids):
            raise CheckpointError(f"{folder / name}: cannot be read: {os.strerror(errno.EACCES)}")
        if not stat.S_ISREG(status.st_mode) or status.st_size != file.num_bytes:
            raise DamagedCheckpoint(
                f"{folder / name}: is truncated or changed: it has {status.st_size} bytes and was written with "
                f"{file.num_bytes}; take another checkpoint"
            )
    return manifest


def is_whole(folder: Path) -> bool:
    with contextlib.suppress(CheckpointError):
        return bool(require_files(folder))
    return False


def put_in_place(temporary_folder: Path, root: Path, step: int) -> None:
    """Give a written and flushed checkpoint its name, and make ``latest`` name it.

    A checkpoint of the same step is renamed, and can still be found, until `prune` removes it.
    """
    target, aside = root / name_of(step), root / f"{name_of(step)}.replaced"
    flush(temporary_folder)
    if os.path.lexists(target):  # a link that leads nowhere, too
        if os.path.lexists(aside) and not is_whole(target):
            remove(target)
        else:
            remove(aside)
            target.rename(aside)
    try:
        temporary_folder.rename(target)
    except OSError:
        with contextlib.suppress(OSError):
            aside.rename(target)
        raise
    flush(root)
    name_latest(target)


def name_latest(path: Path) -> None:
    """Make ``latest`` name a checkpoint that exists."""
    _point(path.parent / LATEST, [path.name])


def resume_from(path: Path, keep_last: int) -> None:
    """Make ``latest`` name the checkpoint from which a run resumes; warn if the run will remove newer ones.

    Args:
        path: the checkpoint.
        keep_last: see `prune`.
    """
    name_latest(path)
    ordered = checkpoints(path.parent)
    if path in ordered and (newer := ordered[ordered.index(path) + 1 :]):
        log.warning(
            "a run resumes in %s from %s, but the folder has newer checkpoints: %s. Saves of this run replace those of "
            "the same step, and remove the others as old ones by checkpoint.keep_last = %d; copy the ones you want to "
            "keep, or use another --run-dir",
            path.parent, path.name, ", ".join(newer_path.name for newer_path in newer), keep_last,
        )  # fmt: skip


def name_best(root: Path, steps: Sequence[int]) -> None:
    """Make ``best`` name the checkpoints of these steps, complete or not, the best first; `prune` keeps them."""
    root.mkdir(parents=True, exist_ok=True)
    _point(root / BEST, [name_of(step) for step in steps])


def _point(pointer: Path, names: Sequence[str]) -> None:
    new = pointer.with_name(f".{pointer.name}")
    write_flushed(new, "".join(f"{name}\n" for name in names).encode())
    os.replace(new, pointer)
    flush(pointer.parent)


def prune(root: Path, keep_last: int, keep_every: int) -> None:
    """Remove replaced checkpoints of the same step, and old ones.

    The ``keep_last`` newest stay, those whose step is a multiple of ``keep_every``, and those that ``best`` names. The
    one that ``latest`` names counts as the newest; a damaged one does not count.

    Args:
        root: folder of checkpoints.
        keep_last: 0 keeps all.
        keep_every: 0 keeps none but the newest.
    """
    for path in checkpoint_steps(root):
        if path.suffix == ".replaced" and is_whole(path.with_suffix("")):
            remove(path)
    steps, num_whole, best = checkpoint_steps(root), 0, _names_in(root / BEST)
    for path in _newest_first(root) if keep_last else ():
        if num_whole < keep_last:
            num_whole += is_whole(path)
        elif (path / MANIFEST).exists() and path.name not in best and (not keep_every or steps[path] % keep_every):
            remove(path)


def remove_later(root: Path, step: int) -> None:
    """Remove checkpoints of later steps, of a branch that a run has left. ``latest`` must name none of them."""
    for path, path_step in checkpoint_steps(root).items():
        if path_step > step:
            remove(path)


def remove_left_over(root: Path, current: Path | None = None) -> None:
    """Remove unfinished checkpoints of a killed run. Call it only if no other run writes to the folder."""
    for path in set(root.iterdir()) - {current}:
        if _LEFT_OVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
