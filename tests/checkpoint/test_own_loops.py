"""Checkpoints in a loop of one's own: where one may save and load in it, what hooks keep, what a failed save does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small_run import Counter, Numbers, make_engine

from colossus.checkpoint import folder
from colossus.checkpoint.errors import CheckpointError
from colossus.engine.engine import Engine
from colossus.engine.fit import Hook, fit


def engine_of(root: Path | None, **options: Any) -> Engine:
    return make_engine(root, data=1, **options)


def steps(engine: Engine, number: int) -> list[float]:
    batches = iter(engine.loader)
    return [engine.train_step(next(batches)).loss for _ in range(number)]


def latest(root: Path) -> str:
    return (root / "latest").read_text().strip()


# -- where a run goes on --------------------------------------------------------------------------------------


def test_going_on_from_an_older_checkpoint_moves_latest(in_memory: Path) -> None:
    """A run that is killed before its next save then goes on with the branch that was chosen."""
    root = in_memory / "checkpoints"
    engine = engine_of(root, every=2, keep_last=0)
    fit(engine)
    engine.close()
    for every, wanted in ((0, "step-00000006"), (2, "step-00000002")):
        engine = engine_of(root, every=every, keep_last=0)
        engine.checkpoints.load(root / folder.name_of(2))
        engine.close()
        assert latest(root) == wanted, "a run that saves nothing has no branch"


# -- the place in the data ------------------------------------------------------------------------------------


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(Numbers().values)


def test_a_save_at_the_top_of_a_loop(in_memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The batch that is not trained on yet comes again; where its place cannot be told any more, a warning says so."""
    for data in (Numbers, Stream):
        root, losses = in_memory / data.__name__, []
        engine = engine_of(root, train_data=data)
        for batch in engine.loader:
            if engine.completed_steps == 2:
                engine.checkpoints.save().wait()
            losses.append(engine.train_step(batch).loss)
            if engine.completed_steps == 4:
                break
        engine.close()
        assert ("1 batch taken from the loader and not trained on" in caplog.text) == (data is Stream)
        if data is Numbers:
            engine = engine_of(root)
            engine.checkpoints.load(root)
            assert steps(engine, 2) == losses[2:]
            engine.close()


# -- hooks ----------------------------------------------------------------------------------------------------


def test_hooks_that_are_set_before_a_load_take_what_was_saved(
    in_memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = in_memory / "checkpoints"
    engine = engine_of(root, every=3, steps=3)
    fit(engine, [Counter()])
    engine.close()
    engine, counter = engine_of(root), Counter()
    engine.checkpoints.hooks = [counter]
    engine.checkpoints.load(root)
    assert (counter.count, caplog.text) == (3, "")
    engine.checkpoints.hooks = []
    engine.checkpoints.load(root)
    assert "state of hooks that this run does not have is dropped: Counter" in caplog.text
    engine.close()


class _SavesItself(Hook):
    def on_step_end(self, engine: Engine, result: Any) -> None:
        engine.checkpoints.save()


# -- saves that fail ------------------------------------------------------------------------------------------


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """``is_full``, and how many checkpoints were written."""
    state, put_in_place = {"is_full": False, "written": 0}, folder.put_in_place

    def put(*args: Any) -> None:
        if state["is_full"]:
            raise OSError(28, "No space left on device")
        state["written"] += 1
        put_in_place(*args)

    monkeypatch.setattr(folder, "put_in_place", put)
    return state


def test_ranks_decide_alike_whether_a_step_is_saved_again(in_memory: Path, disk: dict[str, Any]) -> None:
    """A save by hand may have failed on this rank already, while it is under way on another."""
    engine = engine_of(in_memory / "checkpoints", every=1, steps=1, background=False)
    steps(engine, 1)
    disk["is_full"] = True
    engine.checkpoints.save(background=True).wait_until_done()
    disk["is_full"] = False
    engine.checkpoints.after_step()
    assert disk["written"] == 0
    engine.checkpoints.after_step(is_last=True)
    assert disk["written"] == 1, "all ranks have waited for its end"
    engine.close()


def test_a_save_of_ones_own_counts(in_memory: Path, disk: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """`after_step` writes no checkpoint of a step twice, and tells of the other's end; what failed is told once."""
    root = in_memory / "checkpoints"
    engine = engine_of(root, every=1, steps=4)
    fit(engine, [_SavesItself()])
    engine.close()
    assert disk["written"] == 4
    engine = engine_of(root, every=7, resume="auto")
    engine.checkpoints.resume()
    disk["is_full"] = True
    engine.checkpoints.save()
    engine.checkpoints.finish()
    assert caplog.text.count("No space left") == 1
    with pytest.raises(CheckpointError, match="No space left"):
        engine.checkpoints.save().wait()
    disk["is_full"] = False
    engine.checkpoints.save().wait()
    written = disk["written"]
    engine.checkpoints.after_step(is_last=True)
    assert disk["written"] == written
    engine.checkpoints.load_weights(root)
    engine.checkpoints.after_step(is_last=True)
    assert disk["written"] == written + 1, "the state is that of no checkpoint any more"
    assert caplog.text.count("No space left") == 1, "the other one was raised"
    engine.close()
