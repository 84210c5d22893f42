"""Checkpoints of a run on a CUDA device that does not exist: copies, waits, and where all is after a load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.fake_cuda import Waits, batch_on_device, files_of, run_fake_ranks
from helpers.training import batch_of, config_of
from torch import Tensor

import colossus

OFFLOADED = dict(zero=dict(stage=3, offload=True))


def devices_of(engine: Any) -> dict[str, str]:
    """Of all that a checkpoint has of tensors."""
    found = {name: x.device.type for name, x in engine.model.named_parameters()}
    for number, state in enumerate(engine.optimizer.state.values()):
        found.update({f"{number}.{key}": x.device.type for key, x in state.items() if isinstance(x, Tensor)})
    return found


def saved_and_loaded(
    rank: int, folder: Path, plan: dict[str, Any], precision: str
) -> tuple[dict[str, int], list[int], set[str]]:
    """What waits in a save in the background; in a step after it, and one after its load."""
    config = config_of(plan, 9, precision, device="cuda", model=dict(num_layers=1), checkpoint=dict(dir=str(folder)))
    engine = colossus.initialize(config)
    batch = batch_on_device(batch_of(0))
    engine.train_step(batch)
    Waits.begin_step()
    with Waits(allowed=True) as in_save:
        save = engine.checkpoints.save(background=True)
    path = save.wait().path
    before, steps = devices_of(engine), []
    for _ in range(2):
        Waits.begin_step()
        with Waits(allowed=True) as in_step:
            engine.train_step(batch)
        steps.append(len(in_step.found))
        engine.checkpoints.load(path)
    assert devices_of(engine) == before
    assert engine.completed_steps == 1
    engine.close()
    kinds = set(before.values())
    return files_of(in_save.found), steps, kinds


@pytest.mark.long
def test_a_save_waits_for_one_copy_and_a_load_brings_all_back(tmp_path: Path) -> None:
    """Beside the copy it reads the few numbers of the run that are on the device."""
    ((waits, steps, kinds),) = run_fake_ranks(1, saved_and_loaded, tmp_path / "fp32", {}, "fp32")
    assert waits == {"checkpoint/staging.py": 1, "engine/nonfinite.py": 1}
    assert steps == [0, 0]
    assert kinds == {"cuda"}


@pytest.mark.long
def test_what_is_offloaded_stays_on_the_host(tmp_path: Path) -> None:
    ((waits, steps, kinds),) = run_fake_ranks(1, saved_and_loaded, tmp_path / "fp16", OFFLOADED, "fp16")
    assert waits == {"engine/nonfinite.py": 4}  # rows and state are on the host
    assert steps == [3, 3]
    assert kinds == {"cpu"}
