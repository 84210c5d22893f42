"""The checkpoints of the best evaluations: which they are, that they stay, that they are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import run_ranks
from helpers.small_run import Net, Numbers

import colossus
from colossus.checkpoint.folder import name_best, name_of
from colossus.checkpoint.manifest import read_manifest
from colossus.checkpoint.weight_sources import find_weights
from colossus.engine.fit import fit
from colossus.engine.results import EvalResult
from colossus.monitor.hooks.best_checkpoint import BestCheckpoint

#: of the evaluations after each step
LOSSES = [5.0, 3.0, 4.0, 2.0, 6.0, float("nan"), 2.5, 1.0, 7.0, 8.0]
BEST = {1: [8], 2: [8, 4]}


class Told(BestCheckpoint):
    """Writes down of which checkpoints hooks were told, and which steps are named while a better one is written."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.steps: list[int] = []
        self.named: list[list[str]] = []

    def on_eval_end(self, engine: Any, summary: EvalResult) -> None:
        super().on_eval_end(engine, summary)
        if engine.context.is_logging_rank:
            self.named.append((engine.checkpoints.root / "best").read_text().split())

    def on_checkpoint(self, engine: Any, saved: Any) -> None:
        super().on_checkpoint(engine, saved)
        self.steps.append(saved.step)


def train(
    rank: int, root: Path, steps: int, keep: int, checkpoint: dict[str, Any]
) -> tuple[list[int], list[list[str]]]:
    engine = colossus.initialize(
        dict(
            parallel=dict(data=2),
            model=dict(type=Net),
            data=dict(type=Numbers),
            train=dict(steps=steps, global_batch_size=8, eval_every=1),
            checkpoint=dict(dir=str(root), resume="auto", **checkpoint),
            device="cpu",
        )
    )
    engine.evaluate = lambda: EvalResult(LOSSES[engine.completed_steps - 1], 1, step=engine.completed_steps)  # type: ignore[method-assign]
    hook = Told(keep=keep)
    fit(engine, [hook])
    engine.close()
    return hook.steps, hook.named


def steps_in(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in root.glob("step-????????"))


@pytest.mark.parametrize(
    ("keep", "checkpoint", "there"),
    [
        pytest.param(1, dict(every=3, keep_last=1), [8, 10], marks=pytest.mark.long),
        (2, dict(every=3, keep_last=1), [4, 8, 10]),
        pytest.param(2, dict(every=3, keep_last=1, background=False), [4, 8, 10], marks=pytest.mark.long),
        pytest.param(2, dict(keep_last=1), [4, 8], marks=pytest.mark.long),
    ],
)
def test_the_best_stay_and_a_resumed_run_goes_on_with_them(
    keep: int, checkpoint: dict[str, Any], there: list[int], tmp_path: Path
) -> None:
    saved = {1: [1, 2, 4, 8], 2: [1, 2, 3, 4, 7, 8]}[keep]
    due = [3, 6, 9, 10] if "every" in checkpoint else []
    for root, parts in ((tmp_path / "whole", [10]), (tmp_path / "parts", [5, 10])):
        told = [run_ranks(2, train, root, steps, keep, checkpoint, with_context=False) for steps in parts]
        assert steps_in(root) == there
        assert (root / "best").read_text().split() == [name_of(step) for step in BEST[keep]]
        assert find_weights(root / "best") == root / name_of(8)
        assert read_manifest(root / name_of(8)).step == 8
        if len(parts) == 1:
            assert [steps for steps, _ in told[0]] == [sorted({*saved, *due})] * 2
            _, named = told[0][0]
            assert name_of({1: 4, 2: 7}[keep]) in named[7]

    name_best(root, [99, 8])  # one that is not complete is passed over
    assert find_weights(root / "best") == root / name_of(8)
