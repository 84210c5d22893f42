"""Fixtures of the tests of checkpoints."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder in which a flush costs nothing, where the machine has one."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="colossus-test-", dir=memory if memory.is_dir() else None) as path:
        yield Path(path)
