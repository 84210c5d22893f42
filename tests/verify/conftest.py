"""``colossus verify`` without the seconds that its processes take to start."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest
from helpers.verified import Verify, config_file, launch_forked, leftovers

from colossus.cli.main import main
from colossus.verify import run_verify


@pytest.fixture
def verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Verify:
    """``colossus verify`` of a config text; (exit code, standard output, standard error)."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    monkeypatch.setattr(run_verify, "_launch", launch_forked)

    def run(text: str, *words: str, middle: str = "nn.Identity()") -> tuple[int, str, str]:
        code = main(["verify", str(config_file(tmp_path, text, middle)), "--steps=1", *words])
        seen = capsys.readouterr()
        assert leftovers(tmp_path) == []
        return code, seen.out, seen.err

    return run
