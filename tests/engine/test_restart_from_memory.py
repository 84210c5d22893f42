"""Ranks that are started again go on from the host's memory, or from the disk; never from half of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.small_run import Lines, everything, make_engine

from colossus import machine
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.folder import MEMORY, checkpoint_steps, name_of
from colossus.checkpoint.memory_store import MemoryReader
from colossus.config import ConfigError
from colossus.engine.engine import Engine

STEPS = 6


def engine_of(root: Path, memory_every: int = 1, **checkpoint: Any) -> Engine:
    return make_engine(root / "disk", data=1, steps=STEPS, memory_every=memory_every, background=False, **checkpoint)


def train(engine: Engine, until: int) -> list[Any]:
    """All state behind this step."""
    for batch in engine.loader:
        engine.train_step(batch)
        engine.checkpoints.after_step(is_last=engine.completed_steps == STEPS)
        if engine.completed_steps == until:
            break
    state = everything(engine)
    engine.close()
    return state


def started_again(root: Path, **checkpoint: Any) -> Engine:
    engine = engine_of(root, **checkpoint)
    engine.checkpoints.is_restart, engine.checkpoints.resume_from = True, None
    return engine


def alone(root: Path, monkeypatch: pytest.MonkeyPatch, body: Any) -> Any:
    """What the body gives, in one rank for which a launcher has made a folder."""
    memory = root / "memory"
    memory.mkdir()
    monkeypatch.setenv(MEMORY, str(memory))
    return run_ranks(1, lambda rank: body(), with_context=False)[0]


def breaks_off(self: MemoryReader, key: str, *rest: Any) -> None:
    """Stands in the place of `read_box`: the host that has the rest is gone."""
    if key.startswith("model/second"):
        raise CheckpointError("no answer for 30 s")
    super(MemoryReader, self).read_box(key, *rest)


def test_what_goes_on_from_memory_is_the_undisturbed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> tuple[Any, ...]:
        wanted = train(engine_of(tmp_path / "undisturbed", 0), STEPS)
        train(engine_of(tmp_path, every=2), 5)
        saved_steps = sorted(checkpoint_steps(tmp_path / "memory").values())
        engine = started_again(tmp_path, every=2)
        source = engine.checkpoints.resume()
        return wanted, saved_steps, source, engine.completed_steps, train(engine, STEPS)

    wanted, saved_steps, source, step, again = alone(tmp_path, monkeypatch, body)
    assert (saved_steps, source, step) == ([4, 5], tmp_path / "memory" / name_of(5), 5), "the disk has step 4"
    assert again == wanted


def test_half_of_a_checkpoint_is_not_gone_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reading breaks off when weights are loaded already, and nothing else is there to load over them."""

    def body() -> tuple[Any, ...]:
        train(engine_of(tmp_path), 3)
        monkeypatch.setattr(MemoryReader, "read_box", breaks_off)
        engine = started_again(tmp_path)
        before = {name: value.clone() for name, value in engine.model.state_dict().items()}
        with pytest.raises(RuntimeError) as error:
            engine.checkpoints.resume()
        changed = [name for name, value in engine.model.state_dict().items() if not torch.equal(value, before[name])]
        return str(error.value), changed, sorted(checkpoint_steps(tmp_path / "memory").values())

    message, changed, saved_steps = alone(tmp_path, monkeypatch, body)
    assert "no answer for 30 s" in message
    assert "there is none on the disk" in message
    assert changed, "else nothing was broken"
    assert saved_steps == [2, 3], "the next attempt may find the host again"


def test_half_of_a_checkpoint_is_loaded_over_by_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> tuple[Any, ...]:
        wanted = train(engine_of(tmp_path / "undisturbed", 0), STEPS)
        train(engine_of(tmp_path, every=2), 3)
        monkeypatch.setattr(MemoryReader, "read_box", breaks_off)
        engine = started_again(tmp_path, every=2)
        source = engine.checkpoints.resume()
        return wanted, source, engine.completed_steps, train(engine, STEPS)

    wanted, source, step, again = alone(tmp_path, monkeypatch, body)
    assert (source, step) == (tmp_path / "disk" / name_of(2), 2)
    assert again == wanted


def test_a_run_that_goes_on_with_fewer_hosts_does_without_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fitted when it began may not fit when each host has more of it; a run that begins is refused."""

    def body() -> tuple[Any, ...]:
        wanted = train(engine_of(tmp_path / "undisturbed", 0), STEPS)
        train(engine_of(tmp_path), 3)
        monkeypatch.setattr(machine, "memory_bytes", lambda: (1000, 0))
        monkeypatch.setattr("pathlib.Path.glob", lambda *_: ())  # nothing is held that would make room
        with pytest.raises(ConfigError, match="two generations"):
            train(engine_of(tmp_path), 3)
        lines = Lines().lines
        engine = started_again(tmp_path)
        engine.checkpoints.resume()
        return wanted, train(engine, STEPS), lines

    wanted, again, lines = alone(tmp_path, monkeypatch, body)
    assert again == wanted
    assert [line.split()[0] for line in lines] == ["WARNING"]
    assert "Nothing is saved in memory from here on" in lines[0]
