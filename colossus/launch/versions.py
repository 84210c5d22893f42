"""What ran: versions, platform, commit. Written into the run folder."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import colossus


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


def _git(folder: Path | None, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=5, check=True)
    return done.stdout.strip()
