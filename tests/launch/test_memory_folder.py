"""The folder in the host's memory: there while the launcher is, and of earlier runs only what still runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.restart_faults import CONFIG

from colossus.checkpoint.folder import MEMORY
from colossus.config import load_config
from colossus.launch import memory_folder
from colossus.launch.memory_folder import open_memory_folder

MINE = load_config(str(CONFIG), ["checkpoint.memory_every=1", "launch.restarts=1"], 2)


@pytest.fixture(autouse=True)
def _host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_folder, "HOST_MEMORY", tmp_path)
    monkeypatch.delenv(MEMORY, raising=False)


def interrupted(told: list[Path]) -> None:
    with open_memory_folder(MINE):
        told.append(Path(os.environ[MEMORY]))
        (told[0] / "step-00000001").mkdir()
        assert told[0].stat().st_mode & 0o777 == 0o700
        raise KeyboardInterrupt


def test_it_is_removed_however_the_launcher_ends(tmp_path: Path) -> None:
    told: list[Path] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(told)
    assert told[0].parent == tmp_path
    assert list(tmp_path.iterdir()) == []
    assert MEMORY not in os.environ


def test_what_was_left_is_removed_and_what_runs_is_not(tmp_path: Path) -> None:
    """Also where whoever was removing it was killed behind its lock."""
    left = [tmp_path / f"colossus-memory-{os.getuid()}-{name}" for name in ("killed", "halfremoved")]
    other = tmp_path / f"colossus-memory-{os.getuid() + 1}-killed"
    for folder in (*left, other):
        (folder / "step-00000001").mkdir(parents=True)
    (left[0] / "launcher.lock").touch()
    with open_memory_folder(MINE):
        runs = Path(os.environ[MEMORY])
        assert sorted(tmp_path.iterdir()) == sorted([runs, other])
        with open_memory_folder(MINE):
            assert runs.exists()
        assert os.environ[MEMORY] == str(runs)
