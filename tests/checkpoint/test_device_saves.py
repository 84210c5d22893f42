"""Checkpoints of a run on a CUDA device that does not exist: copies, waits, and where all is after a load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
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


def test_a_save_waits_for_one_copy_and_a_load_brings_all_back(tmp_path: Path) -> None:
    """Beside the copy it reads the few numbers of the run that are on the device."""
    ((waits, steps, kinds),) = run_fake_ranks(1, saved_and_loaded, tmp_path / "fp32", {}, "fp32")
    assert waits == {"checkpoint/snapshot.py": 1, "engine/nonfinite.py": 1}
    assert steps == [0, 0]
    assert kinds == {"cuda"}
    ((waits, steps, kinds),) = run_fake_ranks(1, saved_and_loaded, tmp_path / "fp16", OFFLOADED, "fp16")
    assert waits == {"engine/nonfinite.py": 4}  # rows and state are on the host
    assert steps == [3, 3]
    assert kinds == {"cpu"}


def evaluated(rank: int) -> tuple[int, list[int]]:
    """What waits in an evaluation of one batch, and in the steps before and after it."""
    engine = colossus.initialize(config_of({}, 9, "bf16", device="cuda", model=dict(num_layers=1)))
    batch = batch_on_device(batch_of(0))
    engine.train_step(batch)
    steps = []
    for _ in range(2):
        Waits.begin_step()
        with Waits(allowed=True) as in_step:
            engine.train_step(batch)
        steps.append(len(in_step.found))
        with Waits(allowed=True) as in_evaluation:
            engine.eval_step(batch)
    engine.close()
    return len(in_evaluation.found), steps


def test_an_evaluation_waits_once_for_its_sums() -> None:
    assert run_fake_ranks(1, evaluated) == [(1, [0, 0])]


def wrong_device(rank: int) -> str:
    """The state of a generator that was left on the device is refused, as torch does it."""
    try:
        torch.cuda.default_generators[0].set_state(torch.zeros(16, dtype=torch.uint8, device="cuda"))
    except AssertionError as error:
        return str(error)
    return ""


def test_the_state_of_generators_is_on_the_host() -> None:
    assert run_fake_ranks(1, wrong_device) == ["the state of a generator is on cuda:0"]
