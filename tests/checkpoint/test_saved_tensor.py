"""docs/one-run.md: the functions through which a parameter goes to the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers.page_links import calls_of_a_step, links
from helpers.ranks import run_ranks

LINKED = links("one-run", "A saved tensor")
#: those of the way to the disk; the way back is told in one sentence
WAY = LINKED[: [name for name, _ in LINKED].index("restore")]


def _called(rank: int, root: Path) -> list[str]:
    def save(engine: Any) -> None:
        engine.checkpoints.save(background=True).wait()

    optimizer = dict(type="SGD", lr=0.1, momentum=0.9)
    return calls_of_a_step(rank, WAY, save, optimizer=optimizer, checkpoint=dict(dir=str(root)))


def test_a_save_calls_what_the_page_links_in_its_order(in_memory: Path) -> None:
    names = [name for name, _ in WAY]
    first, *others = run_ranks(4, _called, in_memory / "checkpoints", with_context=False)
    assert first == names
    assert all(called == names[:-1] for called in others)  # rank 0 alone completes it


def test_a_parameter_crosses_few_files() -> None:
    assert len({file for _, file in WAY}) <= 7
