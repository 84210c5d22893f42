"""The folder of one run: where it is, that it is not another run's, and what is written there at the start."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import colossus
from colossus.checkpoint.folder import name_of
from colossus.config import Config, ConfigError, as_dict
from colossus.launch import failure

METRICS, CONFIG, VERSIONS = "metrics.jsonl", "config.json", "versions.json"
#: locked while a run uses the folder: by its launcher, and by its first rank, which may outlive it
LOCK, RANK_LOCK = "run.lock", "rank.lock"
RANKS_ARE_LEFT = "the ranks of a launcher that was killed are still there; try again when they have ended"


def default_folder(name: str, root: Path = Path("runs")) -> Path:
    """``runs/<name>-<YYYYmmdd-HHMMSS>``, with ``-2``, ``-3`` after it when that is taken already. Makes nothing."""
    return next(folder for folder in _candidates(name, root) if not folder.exists())


def make_default_folder(name: str, root: Path = Path("runs")) -> Path:
    """Make the `default_folder`, which no other launch can have made then.

    Raises:
        ConfigError: when it cannot be made.
    """
    for folder in _candidates(name, root):
        try:
            root.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
        except FileExistsError:
            if root.is_dir():
                continue
            raise ConfigError(f"run folder {folder}: {root} is a file, not a folder") from None
        except OSError as error:
            raise ConfigError(f"run folder {folder}: cannot be made: {error.strerror or error}") from None
        return folder
    raise AssertionError("the candidates never end")


def of_name(name: str, root: Path = Path("runs")) -> list[Path]:
    """The default folders of earlier runs of this name, the newest first."""
    pattern = re.compile(re.escape(name) + r"-(\d{8}-\d{6})(?:-(\d+))?")
    try:
        found = [(path, pattern.fullmatch(path.name)) for path in root.iterdir() if path.is_dir()]
    except OSError:
        return []
    dated = [(match[1], int(match[2] or 1), path) for path, match in found if match is not None]
    return [path for _, _, path in sorted(dated, reverse=True)]


def _candidates(name: str, root: Path) -> Iterator[Path]:
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    yield root / stem
    for number in itertools.count(2):
        yield root / f"{stem}-{number}"


def check_unused(folder: Path) -> None:
    """Refuse a folder that another run has written metrics to, or whose ``config.json`` is not of a run.

    Raises:
        ConfigError: naming the folder and what to do.
    """
    check_usable(folder)
    if has_metrics(folder):
        raise ConfigError(
            f"--run-dir {folder}: holds the metrics of another run already ({folder / METRICS}); "
            f"give another folder, or move that file away; --resume goes on with that run"
        )
    if (folder / CONFIG).exists() and not (folder / LOCK).exists():
        raise ConfigError(
            f"--run-dir {folder}: has a {CONFIG} that this run would replace; give another folder, or move it away"
        )


def has_metrics(folder: Path) -> bool:
    metrics = folder / METRICS
    return metrics.exists() and metrics.stat().st_size > 0


def check_usable(folder: Path) -> None:
    """Refuse what can be no folder.

    Raises:
        ConfigError: naming it.
    """
    try:
        folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # a name too long, no permission to look, a null character
        raise ConfigError(f"--run-dir {folder}: cannot be used: {getattr(error, 'strerror', None) or error}") from None
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--run-dir {folder}: is a file, not a folder; give another one")


def prepare(folder: Path, *, is_own: bool = False) -> TextIO:
    """Make the folder, lock it, check it, and remove failure records of an attempt that never wrote metrics.

    Args:
        is_own: an earlier attempt of this very run has used it.

    Returns:
        The lock: the folder is this run's until it is closed, at the latest by the end of the process.

    Raises:
        ConfigError: when it belongs to another run, cannot be made or cannot be written to.
    """
    check_usable(folder)
    if not is_own and not (folder / LOCK).exists():  # once it is locked it has one
        check_unused(folder)
    lock = take(folder, None if is_own else "--run-dir")
    try:
        rank = hold(folder)
        if rank is None:
            raise ConfigError(f"run folder {folder}: {RANKS_ARE_LEFT}")
        rank.close()
        if not is_own:
            check_unused(folder)
        failure.clear(folder)
    except BaseException:
        lock.close()
        raise
    return lock


def take(folder: Path, option: str | None) -> TextIO:
    """Make a folder and lock it.

    Args:
        option: that named it, for messages; None for the folder of the run that is to be resumed.

    Raises:
        ConfigError: when it cannot be made or written to, or another live run has it.
    """
    named = f"{option or 'run folder'} {folder}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{named}: cannot be made: {error.strerror or error}") from None
    try:
        lock = (folder / LOCK).open("a+")
        if _is_locked_elsewhere(lock, fcntl.flock):  # of the open file, so also of processes that are forked
            lock.seek(0)
            holder = lock.read().strip() or "a process"
            lock.close()
            if option is None:
                raise ConfigError(f"the run to be resumed, {folder}, is still running ({holder}); wait for its end")
            raise ConfigError(
                f"{named}: another run is using it now ({holder}); give another folder, or wait for its end"
            )
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {platform.node()}\n")
        lock.flush()
    except OSError as error:
        raise ConfigError(f"{named}: cannot be written to: {error.strerror or error}") from None
    return lock


def hold(folder: Path) -> TextIO | None:
    """What the first rank holds as long as it lives, None when another one does. Not of the processes it forks.

    Raises:
        ConfigError: when the folder cannot be written to.
    """
    try:
        file = (folder / RANK_LOCK).open("a+")
    except OSError as error:
        raise ConfigError(f"run folder {folder}: cannot be written to: {error.strerror or error}") from None
    if _is_locked_elsewhere(file, fcntl.lockf):
        file.close()
        return None
    return file


def _is_locked_elsewhere(file: TextIO, lock: Callable[[TextIO, int], Any]) -> bool:
    """Lock a file, if nobody else has and the file system knows locks."""
    try:
        lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows either answer
        return True
    except OSError:
        pass
    return False


def put_aside_metrics(folder: Path) -> None:
    """Rename the metrics of an attempt that left no checkpoint, ``metrics.lost-1.jsonl``: the run is begun anew."""
    if not has_metrics(folder):
        return
    aside = next(
        path for number in itertools.count(1) if not (path := folder / f"metrics.lost-{number}.jsonl").exists()
    )
    (folder / METRICS).rename(aside)
    print(
        f"colossus: {folder}: an attempt was ended before its first checkpoint; its metrics are in {aside} now, and "
        f"the run begins anew",
        file=sys.stderr,
    )


def write_start(folder: Path, config: Config, data: str | None = None, step: int = 0) -> None:
    """Write ``config.json`` (resolved) and ``versions.json``. On the logging rank.

    Args:
        step: behind which the run goes on. Where it goes on in its folder, the files that stand there stay, and these
            are ``config.step-00000100.json`` and ``versions.step-00000100.json``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    since = f".{name_of(step)}" if step and (folder / CONFIG).exists() else ""
    for name, value in ((CONFIG, as_dict(config)), (VERSIONS, versions(data))):
        path = folder / name
        path.with_stem(f"{path.stem}{since}").write_text(json.dumps(value, indent=2, default=str) + "\n")


def versions(data: str | None = None) -> dict[str, Any]:
    """What ran: versions, platform, the git commit of the working folder, and how the data describes itself."""
    import torch

    cuda = {"cuda": torch.version.cuda} if torch.version.cuda else {}
    return {
        "colossus": colossus.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "command": sys.argv,
        "git": git_state(),
        **cuda,
        **({"data": data} if data is not None else {}),
    }


def git_state(folder: Path | None = None) -> dict[str, Any] | None:
    """Commit of the working folder and whether it has changes; None outside a repository or without git."""
    found = []
    for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=5, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        found.append(done.stdout.strip())
    return {"commit": found[0], "changed": bool(found[1])}


def last_metrics(folder: Path) -> dict[str, Any] | None:
    """The last complete row of the run's metrics, None when there is none."""
    try:
        lines = (folder / METRICS).read_bytes().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        return row if isinstance(row, dict) else None
    return None
