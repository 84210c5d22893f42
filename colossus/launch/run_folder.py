"""The folder of one run: where it is, that it is not another run's, and what is written there at the start."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import colossus
from colossus.config import Config, ConfigError, as_dict
from colossus.launch import failure

METRICS = "metrics.jsonl"


def default_folder(name: str, root: Path = Path("runs")) -> Path:
    """``runs/<name>-<YYYYmmdd-HHMMSS>``, with ``-2``, ``-3`` after it when that is taken already."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, number = root / stem, 1
    while folder.exists():
        number += 1
        folder = root / f"{stem}-{number}"
    return folder


def check_unused(folder: Path) -> None:
    """Refuse a folder that another run has written metrics to.

    Raises:
        ConfigError: naming the folder and what to do.
    """
    metrics = folder / METRICS
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--run-dir {folder}: is a file, not a folder; give another one")
    if metrics.exists() and metrics.stat().st_size > 0:
        raise ConfigError(
            f"--run-dir {folder}: holds the metrics of another run already ({metrics}); "
            f"give another folder, or move that file away"
        )


def prepare(folder: Path) -> None:
    """Check the folder, make it, and remove failure records of an attempt that never wrote metrics.

    Raises:
        ConfigError: when it belongs to another run or cannot be made.
    """
    check_unused(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--run-dir {folder}: cannot be made: {error.strerror or error}") from None
    failure.clear(folder)


def write_start(folder: Path, config: Config, data: str | None = None) -> None:
    """Write ``config.json`` (resolved) and ``versions.json``. On the logging rank."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", as_dict(config))
    _write_json(folder / "versions.json", versions(data))


def versions(data: str | None = None) -> dict[str, Any]:
    """What ran: versions, platform, the git commit of the working folder, and how the data describes itself."""
    import torch

    found: dict[str, Any] = {
        "colossus": colossus.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "command": sys.argv,
        "git": git_state(),
    }
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if data is not None:
        found["data"] = data
    return found


def git_state(folder: Path | None = None) -> dict[str, Any] | None:
    """Commit of the working folder and whether it has changes; None outside a repository or without git."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return {"commit": commit, "changed": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


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


def _git(folder: Path | None, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=5, check=True)
    return done.stdout.strip()


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, default=str) + "\n")
