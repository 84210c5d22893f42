"""Folders of checkpoints: their names, which one is the latest, how one is put in place, which are removed. No torch.

    checkpoints/
        latest                  text: the name of the newest complete checkpoint
        best                    text: the names of those with the best metric, the best first, where any were looked for
        step-00000100/          manifest.json, rank-00000.safetensors, ...
        step-00000200.tmp-...   being written, or left by a run that was killed meanwhile

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
#: environment variable with a folder in the host's memory, where a launch has made one
MEMORY = "COLOSSUS_MEMORY"
#: below a run folder, unless the config names another place
IN_RUN_FOLDER = "checkpoints"
_NAME = re.compile(r"step-(\d{8,})(\.replaced)?")
_LEFT_OVER = re.compile(r"step-\d{8,}\.(tmp|deleted)-.*")


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def file_of(rank: int) -> str:
    """The file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def absolute(path: Path | str) -> Path:
    """Where a path that a user gives leads now, whatever the working directory will be: ``~`` is the home."""
    return Path(os.path.abspath(user_path(path)))


def root_of(given: str | None, run_folder: Path) -> Path:
    """The folder of a run's checkpoints: ``checkpoint.dir``, or one in its run folder."""
    return user_path(given) if given is not None else run_folder / IN_RUN_FOLDER


def temporary(root: Path, step: int, token: str) -> Path:
    """Where a checkpoint is written before it is complete."""
    return root / f"{name_of(step)}.tmp-{token}"


def named(root: Path) -> dict[Path, int]:
    """What has the name of a checkpoint, by name, and its step; whether it is one is not looked at."""
    try:
        names = sorted(os.listdir(root))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be read: {error.strerror or error}") from None
    return {root / name: int(matched[1]) for name in names if (matched := _NAME.fullmatch(name))}


def checkpoints(root: Path) -> list[Path]:
    """Return the folders in ``root`` with the name and the manifest of a checkpoint, the oldest first. Whether they are
    intact is not looked at.

    They are ordered by when they were saved, since a run may have gone back, as their manifests say: a copy of a folder
    need not keep the times of its files.
    """
    dated = []
    for path, step in named(root).items():
        try:
            dated.append((_saved_at(path, (path / MANIFEST).stat().st_mtime_ns), step, path))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    return [path for _, _, path in sorted(dated)]


@lru_cache(maxsize=1024)
def _saved_at(path: Path, modified_ns: int) -> float:
    """Return when a checkpoint was saved, in seconds since 1970; of one whose manifest is damaged the file's time."""
    try:
        return read_manifest(path).saved_at
    except DamagedCheckpoint:
        return modified_ns / 1e9


def find_latest(
    root: Path, damaged: dict[Path, CheckpointError] | None = None, until: int | None = None
) -> Path | None:
    """The checkpoint that ``latest`` names, if its files are all there in their sizes; else the newest that is so.

    What is passed over is told in a warning. None where the folder holds no checkpoint. When none of them is whole a
    `DamagedCheckpoint` names the newest; one that cannot be read, or is of another version, is never passed over.

    Args:
        damaged: those that are known not to be whole; what is found of them is added.
        until: those of a later step are passed over.
    """
    damaged = {} if damaged is None else damaged
    steps = named(root)
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
    """What ``latest`` names, then all others, the newest first, at last what has a name and no manifest."""
    found = checkpoints(root)[::-1]
    found += [path for path in reversed(named(root)) if path not in found]
    names = _names_in(root / LATEST)
    if not names:
        return found
    name = names[0]
    if root / name in found:
        found.remove(root / name)
        return [root / name, *found]
    log.warning("%s names %r, which is not there%s", root / LATEST, name, ": taking the newest" if found else "")
    return found


def _names_in(pointer: Path) -> list[str]:
    """The names that a file like ``latest`` holds; none where there is no such file."""
    try:
        return pointer.read_text().split()
    except (OSError, UnicodeDecodeError):
        return []


def locate(path: Path, damaged: dict[Path, CheckpointError] | None = None) -> Path:
    """The checkpoint folder that a user means: one itself, a folder of checkpoints, or a run folder; or the first one
    that a file ``latest`` or ``best`` names and that is there.

    ``damaged`` is that of `find_latest`.
    """
    path = user_path(path)
    try:
        if path.name in (LATEST, BEST):
            path = next((one for name in _names_in(path) if (one := path.parent / name).is_dir()), path)
        if (path / MANIFEST).exists():
            if damaged is not None and path in damaged:
                raise damaged[path]
            require_files(path)
            return path
        for root in (path, path / IN_RUN_FOLDER):
            found = find_latest(root, damaged)
            if found is not None:
                return found
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
    """That a checkpoint has its manifest, which is returned, and all of its files, in their sizes: else a
    `DamagedCheckpoint`; a plain `CheckpointError` when one cannot be read, or it is of another version."""
    manifest = read_manifest(folder)
    for name, file in manifest.files.items():
        try:
            found = (folder / name).stat()
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{folder}: {name} is missing; take another checkpoint") from None
        except OSError as error:
            raise CheckpointError(f"{folder / name}: cannot be read: {error.strerror or error}") from None
        if not os.access(folder / name, os.R_OK, effective_ids=os.access in os.supports_effective_ids):
            raise CheckpointError(f"{folder / name}: cannot be read: {os.strerror(errno.EACCES)}")
        if not stat.S_ISREG(found.st_mode) or found.st_size != file.num_bytes:
            raise DamagedCheckpoint(
                f"{folder / name}: is truncated or changed: it has {found.st_size} bytes and was written with "
                f"{file.num_bytes}; take another checkpoint"
            )
    return manifest


def is_whole(folder: Path) -> bool:
    with contextlib.suppress(CheckpointError):
        return bool(require_files(folder))
    return False


def put_in_place(temporary_folder: Path, root: Path, step: int) -> None:
    """Give a written and flushed checkpoint its name, and let ``latest`` name it.

    A checkpoint of the same step stays, under a name by which it is found, too, until `prune` removes it.
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
    """Let ``latest`` name a checkpoint that is there."""
    _point(path.parent / LATEST, [path.name])


def go_on_from(path: Path, keep_last: int) -> None:
    """Let ``latest`` name the checkpoint from which a run goes on, with a warning where it will remove newer ones.

    Args:
        keep_last: of `prune`.
    """
    name_latest(path)
    ordered = checkpoints(path.parent)
    if path in ordered and (newer := ordered[ordered.index(path) + 1 :]):
        log.warning(
            "%s goes on from %s, but holds newer checkpoints: %s. Saves of this run replace those of the same step, "
            "and remove the others as old ones by checkpoint.keep_last = %d; copy what you want to keep, or give "
            "another --run-dir",
            path.parent, path.name, ", ".join(each.name for each in newer), keep_last,
        )  # fmt: skip


def name_best(root: Path, steps: Sequence[int]) -> None:
    """Let ``best`` name the checkpoints of these steps, the best first, whether or not they are complete yet: `prune`
    leaves them."""
    root.mkdir(parents=True, exist_ok=True)
    _point(root / BEST, [name_of(step) for step in steps])


def _point(pointer: Path, names: Sequence[str]) -> None:
    new = pointer.with_name(f".{pointer.name}")
    write_flushed(new, "".join(f"{name}\n" for name in names).encode())
    os.replace(new, pointer)
    flush(pointer.parent)


def prune(root: Path, keep_last: int, keep_every: int) -> None:
    """Remove those that were replaced by one of the same step, and old ones: all but the ``keep_last`` newest, those
    whose step is a multiple of ``keep_every``, and those that ``best`` names.

    What ``latest`` names counts as the newest. One that is damaged does not count.

    Args:
        keep_last: 0 keeps all.
        keep_every: 0 keeps none but the newest.
    """
    for path in named(root):
        if path.suffix == ".replaced" and is_whole(path.with_suffix("")):
            remove(path)
    steps, kept, best = named(root), 0, _names_in(root / BEST)
    for path in _newest_first(root) if keep_last else ():
        if kept < keep_last:
            kept += is_whole(path)
        elif (path / MANIFEST).exists() and path.name not in best and (not keep_every or steps[path] % keep_every):
            remove(path)


def remove_later(root: Path, step: int) -> None:
    """Those of a later step: of a branch that a run has left. ``latest`` names none of them any more."""
    for path, of_path in named(root).items():
        if of_path > step:
            remove(path)


def remove_left_over(root: Path, besides: Path | None = None) -> None:
    """What a run that was killed has left unfinished. Only where no other run writes to the folder."""
    for path in set(root.iterdir()) - {besides}:
        if _LEFT_OVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
