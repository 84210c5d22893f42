"""The way of a failure through the code, which docs/one-run.md tells."""

from __future__ import annotations

from pathlib import Path

from helpers.launching import LAUNCH, finish, start
from helpers.page_links import calls_of_children, links
from helpers.restart_faults import CONFIG

LINKS = links("one-run", "A failure")


def test_a_failure_takes_the_way_that_the_page_tells(tmp_path: Path) -> None:
    words = [*LAUNCH[:-1], str(CONFIG), "--run-dir", "run", "train.steps=3", "--max-restarts", "1"]
    with calls_of_children(LINKS, tmp_path / "calls"):
        launcher = start(words, tmp_path, TROUBLES="raise@2")
    code, _, err = finish(launcher)
    assert (code, err.count("restart 1 of 1")) == (0, 1), err
    assert [*dict.fromkeys((tmp_path / "calls").read_text().split())] == [name for name, _ in LINKS]
    assert len({file for _, file in LINKS}) <= 6
