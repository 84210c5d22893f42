"""Checkpoints and state dicts of tables whose rows owners store: any plan reads what any other has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.two_tables import Words, batch_of, loss_fn

import colossus
from colossus.checkpoint import CheckpointReader
from colossus.engine.engine import Engine

SAMPLES = 12


def step(engine: Engine, number: int) -> float:
    batch = batch_of(number, SAMPLES, engine.context.index("data"), engine.context.size("data"))
    return engine.train_step(batch).loss


def make(data: int, way: str, folder: Path, **optimizer: Any) -> Engine:
    config = dict(
        parallel=dict(data=data, strategy=dict(type="hybrid", ways={"*": way})),
        optimizer=optimizer or dict(type="AdamW", lr=0.05),
        train=dict(steps=9, global_batch_size=SAMPLES, precision="fp64"),
        checkpoint=dict(dir=str(folder)),
    )
    return colossus.initialize(config, model=Words, loss_fn=loss_fn)


def save(rank: int, data: int, way: str, folder: Path) -> list[float]:
    engine = make(data, way, folder)
    for number in range(2):
        step(engine, number)
    engine.checkpoints.save()
    losses = [step(engine, number) for number in range(2, 4)]
    engine.close()
    return losses


def resume(rank: int, data: int, way: str, folder: Path) -> list[float]:
    engine = make(data, way, folder)
    engine.checkpoints.load(folder)
    losses = [step(engine, number) for number in range(2, 4)]
    engine.close()
    return losses


def all_resumed(rank: int, world: int, folders: list[Path]) -> dict[str, list[float]]:
    ways = [WAYS[(number + world) % len(WAYS)] for number in range(len(folders))]
    return {f"{at.name} by {way}": resume(rank, world, way, at) for at, way in zip(folders, ways, strict=True)}


def all_saved(rank: int, world: int, root: Path) -> list[list[float]]:
    return [save(rank, world, way, root / f"{world} {way}") for way in WAYS]


WAYS = ("owners", "gather", "dense")


@pytest.mark.long
def test_a_run_goes_on_under_any_number_of_owners_and_any_way(tmp_path: Path) -> None:
    expected = run_ranks(1, all_saved, 1, tmp_path, with_context=False)[0][0]
    for saved in run_ranks(3, all_saved, 3, tmp_path, with_context=False):
        for losses in saved:
            assert losses == pytest.approx(expected, rel=1e-11)
    folders = [tmp_path / name for name in ("1 owners", "3 owners", "3 gather")]
    for world in (1, 2):
        for found in run_ranks(world, all_resumed, world, folders, with_context=False):
            for name, losses in found.items():
                assert losses == pytest.approx(expected, rel=1e-11), f"{name} on {world}"


def test_a_checkpoint_has_every_row_and_its_optimizer_state_once(tmp_path: Path) -> None:
    run_ranks(3, save, 3, "owners", tmp_path / "three", with_context=False)
    run_ranks(1, save, 1, "dense", tmp_path / "one", with_context=False)
    (three,), (one,) = ((list((tmp_path / name).glob("step-*"))) for name in ("three", "one"))
    with CheckpointReader(three) as reader, CheckpointReader(one) as reference:
        reader.verify()
        of_model = {key: entry for key, entry in reader.manifest.tensors.items() if not key.startswith("ranks/")}
        assert of_model.keys() == {key for key in reference.manifest.tensors if not key.startswith("ranks/")}
        for key, entry in of_model.items():
            assert entry.shape == reference.manifest.tensors[key].shape
            torch.testing.assert_close(reader.tensor(key), reference.tensor(key), rtol=1e-12, atol=1e-14)
