"""The folder of one run: its place, its locks against other runs, and the files that a start writes."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import colossus
from colossus import machine
from colossus.checkpoint.folder import name_of
from colossus.config import Config, ConfigError, as_dict, without_credentials
from colossus.monitor.row_file import read_rows

METRICS, CONFIG, VERSIONS = "metrics.jsonl", "config.json", "versions.json"
#: the config that the launcher has resolved, for the ranks of its node
RESOLVED = "resolved.json"
#: files that a run's launcher, and its first rank, which may outlive it, lock while they use the folder
LOCK, RANK_LOCK = "run.lock", "rank.lock"


def default_folder(name: str, root: Path = Path("runs"), *, make: bool = False) -> Path:
    """Return ``runs/<name>-<YYYYmmdd-HHMMSS>``, with ``-2``, ``-3`` after it where that exists already.

    The time is UTC, so that a container and its host, whose local times may differ, agree on the newest run.

    Args:
        name: the name of the run.
        root: the folder of all runs.
        make: make the folder, so that no other launch can get the same.

    Raises:
        ConfigError: it cannot be made.
    """
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    for number in itertools.count(1):
        folder = root / (stem if number == 1 else f"{stem}-{number}")
        if folder.exists():
            continue
        if make:
            try:
                folder.mkdir(parents=True)
            except OSError as error:
                if folder.exists():
                    continue
                raise ConfigError(f"run folder {folder}: cannot be made: {error.strerror or error}") from None
        return folder
    raise AssertionError("the numbers never end")


def of_name(name: str, root: Path = Path("runs")) -> list[Path]:
    """Return the default folders of earlier runs of this name, the newest first."""
    pattern = re.compile(re.escape(name) + r"-(\d{8}-\d{6})(?:-(\d+))?")
    try:
        matches = [(path, pattern.fullmatch(path.name)) for path in root.iterdir() if path.is_dir()]
    except OSError:
        return []
    dated = [(match[1], int(match[2] or 1), path) for path, match in matches if match is not None]
    return [path for _, _, path in sorted(dated, reverse=True)]


# -- checks and locks -------------------------------------------------------------------------------------------


def check(folder: Path, *, is_own: bool = False) -> None:
    """Raise ConfigError for a path that cannot be a folder, or a folder with metrics or a config of another run.

    Args:
        folder: the run folder.
        is_own: whether an earlier attempt of this run has used it.
    """
    try:
        exists = os.stat(folder) is not None
    except (FileNotFoundError, NotADirectoryError):
        exists = False
    except (OSError, ValueError) as error:  # the name is too long, has a null character, or may not be read
        raise ConfigError(f"--run-dir {folder}: cannot be used: {getattr(error, 'strerror', None) or error}") from None
    if exists and not folder.is_dir():
        raise ConfigError(f"--run-dir {folder}: is a file, not a folder; give another one")
    if not is_own and has_metrics(folder):
        raise ConfigError(
            f"--run-dir {folder}: holds the metrics of another run already ({folder / METRICS}); "
            f"give another folder, or move that file away; --resume continues that run"
        )
    if not is_own and (folder / CONFIG).exists() and not (folder / LOCK).exists():
        raise ConfigError(
            f"--run-dir {folder}: has a {CONFIG} that this run would replace; give another folder, or move it away"
        )


def has_metrics(folder: Path) -> bool:
    metrics = folder / METRICS
    return metrics.exists() and metrics.stat().st_size > 0


def prepare(folder: Path, *, is_own: bool = False) -> TextIO:
    """Make the folder, lock it and check it.

    Args:
        folder: the run folder.
        is_own: whether an earlier attempt of this run has used it.

    Returns:
        The lock, which makes the folder this run's until it is closed, or until the process ends.

    Raises:
        ConfigError: the folder belongs to another run, cannot be made or cannot be written to.
    """
    # before the lock, so that a refused folder gets no lock file. A folder that has one may be a live run's, which the
    # error of `take` says first
    check(folder, is_own=is_own or (folder / LOCK).exists())
    lock = take(folder, None if is_own else "--run-dir")
    try:
        hold(folder).close()
        check(folder, is_own=is_own)
        require_room(folder, f"run folder {folder}")
    except BaseException:
        lock.close()
        raise
    return lock


def take(folder: Path, option: str | None) -> TextIO:
    """Make a folder and lock it.

    Args:
        folder: the folder.
        option: the option that names it, for messages; None for the folder of the run that is resumed.

    Raises:
        ConfigError: it cannot be made or written to, or another live run uses it.
    """
    named = f"{option or 'run folder'} {folder}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{named}: cannot be made: {error.strerror or error}") from None
    is_taken = f"{named}: another run is using it now" if option else f"the run to be resumed, {folder}, is running"
    return _lock(folder / LOCK, named, is_taken, fcntl.flock)  # forked processes share this lock


def hold(folder: Path) -> TextIO:
    """Take the lock that the first rank holds as long as it lives; the processes that it forks do not share it.

    Raises:
        ConfigError: the folder cannot be written to, or the first rank of another attempt lives.
    """
    named = f"run folder {folder}"
    is_taken = f"{named}: the ranks of a launcher that was killed are still there"
    return _lock(folder / RANK_LOCK, named, is_taken, fcntl.lockf)


def _lock(path: Path, named: str, is_taken: str, lock: Callable[[TextIO, int], Any]) -> TextIO:
    """Open a file, lock it where the file system has locks, and write this process's id into it."""
    try:
        file = path.open("a+")
        try:
            lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # POSIX allows either answer
            file.seek(0)
            holder = file.read().strip() or "a process"
            file.close()
            raise ConfigError(f"{is_taken} ({holder}); wait for its end") from None
        except OSError as error:
            if path.name == LOCK:  # the first of them
                print(
                    f"colossus: {path}: the file system has no locks ({error.strerror or error}): nothing keeps "
                    f"another run out of this folder",
                    file=sys.stderr,
                )
    except OSError as error:
        raise ConfigError(f"{named}: cannot be written to: {error.strerror or error}") from None
    with contextlib.suppress(OSError):  # a restarted run continues without the text where the disk is full
        os.ftruncate(file.fileno(), 0)
        os.write(file.fileno(), f"process {os.getpid()} on {platform.node()}\n".encode())
    return file


def require_room(folder: Path, named: str) -> None:
    """Raise ConfigError where the disk of a folder is full, or a quota is used up."""
    probe = folder / f".room-{os.getpid()}"
    try:
        probe.write_bytes(bytes(machine.LITTLE_ROOM))
    except OSError as error:
        full = f": less than {machine.LITTLE_ROOM >> 20} MB is left; make room, or give another folder"
        more = full if error.errno in machine.DISK_IS_FULL else ""
        raise ConfigError(f"{named}: cannot be written to: {error.strerror or error}{more}") from None
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


# -- files of a start -------------------------------------------------------------------------------------------


def write_start(folder: Path, config: Config, data: str | None = None, step: int = 0) -> None:
    """Write ``config.json`` (resolved) and ``versions.json``; called on the logging rank.

    Args:
        folder: the run folder.
        config: the resolved config.
        data: a description of the data.
        step: the step after which the run continues. Where the folder has these files already, they stay, and the new
            ones are ``config.step-00000100.json`` and ``versions.step-00000100.json``.
    """
    import torch

    versions = {
        "colossus": colossus.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "command": [without_credentials(word) for word in sys.argv],
        "git": _git_commit(),
        "data": data,
    }
    folder.mkdir(parents=True, exist_ok=True)
    since = f".{name_of(step)}" if step and (folder / CONFIG).exists() else ""
    for name, value in ((CONFIG, as_dict(config)), (VERSIONS, versions)):
        path = (folder / name).with_stem(f"{Path(name).stem}{since}")
        try:
            path.write_text(json.dumps(value, indent=2, default=str) + "\n")
        except OSError as error:  # the disk of a restarted run may be full
            print(f"colossus: {path} cannot be written ({error.strerror}); training continues", file=sys.stderr)


def _git_commit() -> str | None:
    """Return the commit of the working folder, with ``-dirty`` where it has changes; None without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    return None


def last_metrics(folder: Path) -> dict[str, Any] | None:
    """Return the last complete row of the run's metrics; None without one, or where the file cannot be read."""
    with contextlib.suppress(OSError):
        return next(read_rows(folder / METRICS, newest_first=True), None)
    return None
