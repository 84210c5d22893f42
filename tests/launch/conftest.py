"""Fixtures of the launcher's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.launching import FOREIGN

from colossus.launch import agent, command, local_processes, nodes, stop
from colossus.launch.ends import GRACE_SECONDS


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> float:
    """Of the forked launchers and their ranks: for runs that are waited for in vain, and must be ended by force."""
    seconds = 1.5
    monkeypatch.setattr(stop, "GRACE_SECONDS", seconds)
    monkeypatch.setattr(local_processes, "KILL_SECONDS", seconds + local_processes.KILL_SECONDS - GRACE_SECONDS)
    monkeypatch.setattr(nodes, "END_SECONDS", seconds + nodes.END_SECONDS - GRACE_SECONDS)
    return seconds


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Outside of any launcher, in an empty folder; starting processes is an error."""
    for name in FOREIGN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def refuse(*arguments: object, **options: object) -> int:
        raise AssertionError("a process would have been started")

    monkeypatch.setattr(agent, "run_workers", refuse)
    monkeypatch.setattr(command, "_prepare_environment", lambda *arguments: None)
