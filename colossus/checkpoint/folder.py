"""Folders of checkpoints: their names, which one is the latest, how one is put in place, which are removed. No torch.

    checkpoints/
        latest                  text: the name of the newest complete checkpoint
        step-00000100/          manifest.json, rank-00000.safetensors, ...
        step-00000200.tmp-...   being written, or left by a run that was killed meanwhile

A checkpoint is complete when it has its name: everything is written and flushed under a temporary one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.manifest import MANIFEST, read_manifest

LATEST = "latest"
#: below a run folder, unless the config names another place
IN_RUN_FOLDER = "checkpoints"
_NAME = re.compile(r"step-(\d{8,})(\.replaced)?")
_LEFT_OVER = re.compile(r"step-\d{8,}\.(tmp|deleted)-.*")


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def root_of(given: str | None, run_folder: Path) -> Path:
    """The folder of a run's checkpoints: ``checkpoint.dir``, or one in its run folder."""
    return Path(given) if given is not None else run_folder / IN_RUN_FOLDER


def temporary(root: Path, step: int, token: str) -> Path:
    """Where a checkpoint is written before it is complete."""
    return root / f"{name_of(step)}.tmp-{token}"


@dataclass(frozen=True)
class Found:
    """A folder that looks like a checkpoint."""

    path: Path
    step: int
    saved_at: float


def checkpoints(root: Path) -> list[Found]:
    """The folders in ``root`` with the name and the manifest of a checkpoint, the oldest first by when they were
    completed; whether they are intact is not looked at."""
    found = []
    for path, step in _named(root):
        with contextlib.suppress(OSError):
            found.append(Found(path, step, (path / MANIFEST).stat().st_mtime))
    return sorted(found, key=lambda each: (each.saved_at, each.step))


def _named(root: Path) -> Iterator[tuple[Path, int]]:
    try:
        names = sorted(os.listdir(root))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be read: {error.strerror or error}") from None
    for name in names:
        matched = _NAME.fullmatch(name)
        if matched is not None:
            yield root / name, int(matched[1])


def find_latest(root: Path) -> Path | None:
    """The checkpoint that ``latest`` names, if its files are all there in their sizes; else the newest that is so.

    None where the folder holds no checkpoint.

    Raises:
        CheckpointError: when there are checkpoints and none of them is whole: what is wrong with the newest.
    """
    candidates = [found.path for found in reversed(checkpoints(root))]
    with contextlib.suppress(OSError, UnicodeDecodeError):
        named = root / (root / LATEST).read_text().strip()
        if named in candidates:
            candidates.remove(named)
            candidates.insert(0, named)
    first: CheckpointError | None = None
    for path in candidates:
        try:
            require_files(path)
        except CheckpointError as error:
            first = first or error
        else:
            return path
    if first is not None:
        raise first
    return None


def locate(path: Path) -> Path:
    """The checkpoint folder that a user means: one itself, a folder of checkpoints, or a run folder.

    Raises:
        CheckpointError: when there is none, or it is not whole.
    """
    if (path / MANIFEST).exists():
        require_files(path)
        return path
    for root in (path, path / IN_RUN_FOLDER):
        found = find_latest(root)
        if found is not None:
            return found
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such folder")
    inside = sorted(os.listdir(path))[:5] if path.is_dir() else ["a file"]
    raise CheckpointError(
        f"{path}: is neither a checkpoint (no {MANIFEST}), nor a folder of checkpoints (no step-..), nor a run folder "
        f"with checkpoints; it holds {', '.join(inside) or 'nothing'}"
    )


def require_files(folder: Path) -> None:
    """That a checkpoint has its manifest and all of its files, in their sizes, and no others.

    Raises:
        CheckpointError: naming the file.
    """
    manifest = read_manifest(folder)
    for name, file in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            raise CheckpointError(f"{folder}: {name} is missing; take another checkpoint") from None
        except OSError as error:
            raise CheckpointError(f"{folder / name}: cannot be read: {error.strerror or error}") from None
        if size != file.num_bytes:
            verb = "truncated" if size < file.num_bytes else "changed"
            raise CheckpointError(
                f"{folder / name}: is {verb}: it has {size} bytes and was written with {file.num_bytes}; take another "
                f"checkpoint"
            )
    extra = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors") and name not in manifest.files)
    if extra:
        raise CheckpointError(
            f"{folder}: {', '.join(extra[:3])} is not a file of this checkpoint: its manifest does not name it; move "
            f"it away"
        )


def put_in_place(temporary_folder: Path, root: Path, step: int) -> Path:
    """Give a written and flushed checkpoint its name, and let ``latest`` name it.

    A checkpoint of the same step is kept aside until that is done.
    """
    flush_folder(temporary_folder)
    target = root / name_of(step)
    aside = root / f"{name_of(step)}.replaced"
    if target.exists():
        remove(aside)
        target.rename(aside)
    temporary_folder.rename(target)
    flush_folder(root)
    write_flushed(root / f".{LATEST}", f"{target.name}\n".encode())
    os.replace(root / f".{LATEST}", root / LATEST)
    flush_folder(root)
    remove(aside)
    return target


def prune(root: Path, keep_last: int, keep_every: int) -> list[Path]:
    """Remove old checkpoints: all but the ``keep_last`` newest and those whose step is a multiple of ``keep_every``.

    Args:
        keep_last: 0 keeps all.
        keep_every: 0 keeps none but the newest.

    Returns:
        What was removed.
    """
    if keep_last == 0:
        return []
    old = checkpoints(root)[:-keep_last]
    removed = [each.path for each in old if not keep_every or each.step % keep_every]
    for path in removed:
        remove(path)
    return removed


def remove_left_over(root: Path) -> None:
    """What a run that was killed has left unfinished. Only where no other run writes to the folder."""
    for name in os.listdir(root):
        if _LEFT_OVER.fullmatch(name):
            shutil.rmtree(root / name, ignore_errors=True)


def remove(folder: Path) -> None:
    """Remove a checkpoint: it loses its name first, so that no half of it is ever taken for one."""
    if folder.exists():
        dying = folder.with_name(f"{name_of(0)}.deleted-{folder.name}-{os.getpid()}")
        folder.rename(dying)
        shutil.rmtree(dying, ignore_errors=True)


def write_flushed(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, where the file system lets one."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
