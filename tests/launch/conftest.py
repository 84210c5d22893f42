"""Fixtures of the launcher's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.launching import FOREIGN

from colossus.launch import command


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Outside of any launcher, in an empty folder; starting processes is an error."""
    for name in FOREIGN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def refuse(*arguments: object) -> int:
        raise AssertionError("a process would have been started")

    monkeypatch.setattr(command, "_launch", refuse)
