"""Folders of torch.distributed.checkpoint: in under any plan, out for plain torch, and no pickle that runs code."""

from __future__ import annotations

import json
import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.training import config_of
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import colossus
from colossus.checkpoint import CheckpointError, full_state_dict, read_state_dict
from colossus.checkpoint.errors import DamagedCheckpoint
from colossus.cli.main import main
from colossus.context.local_ranks import run_local_ranks

PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "1d": (2, dict(parallel=dict(tensor=2))),
    "pipeline": (2, dict(parallel=dict(pipeline=2))),
    "zero 3": (2, dict(parallel=dict(data=2, zero=3))),
    "2d": (4, dict(parallel=dict(tensor=dict(mode="2d", size=4)))),
    "3d": (8, dict(parallel=dict(tensor=dict(mode="3d", size=8)))),
}


def engine_of(world: int, plan: dict[str, Any], **more: Any) -> Any:
    return colossus.initialize(config_of({}, 2, "fp64", **{**plan, **more}))


def saves(rank: int, world: int, plan: dict[str, Any], root: Path) -> None:
    engine = engine_of(world, plan, checkpoint=dict(dir=str(root)))
    path = engine.checkpoints.save(background=False).wait().path
    state = full_state_dict(engine.model, engine.context)
    if rank == 0:
        torch.save(state, root / "state.pt")
        (root / "path.json").write_text(json.dumps(str(path)))
    engine.close()


def loads(rank: int, world: int, plan: dict[str, Any], folder: Path, state: Path) -> None:
    engine = engine_of(world, plan, train=dict(seed=99))
    # DCP has tied weights under each of their names
    match = engine.checkpoints.load_weights(folder, rename={"head.weight": None})
    assert match.is_complete
    here, expected = full_state_dict(engine.model, engine.context), torch.load(state)
    if rank == 0:
        assert here.keys() == expected.keys()
        assert all(torch.equal(here[key], expected[key]) for key in expected)
    engine.close()


def there_and_back(first: str, second: str, root: Path) -> None:
    root.mkdir(exist_ok=True)
    world, plan = PLANS[first]
    run_ranks(world, saves, world, plan, root, with_context=False)
    checkpoint = json.loads((root / "path.json").read_text())
    assert main(["checkpoint", "convert", checkpoint, str(root / "dcp"), "--to", "dcp"]) == 0
    expected = read_state_dict(checkpoint)
    state = {key: torch.zeros_like(value) for key, value in expected.items()}
    dcp.load(state, checkpoint_id=root / "dcp", no_dist=True)  # as plain torch does
    assert all(torch.equal(state[key], expected[key]) for key in expected)
    world, plan = PLANS[second]
    run_ranks(world, loads, world, plan, root / "dcp", root / "state.pt", with_context=False)


def test_there_and_back(tmp_path: Path) -> None:
    there_and_back("1d", "zero 3", tmp_path / "run")


@pytest.mark.long
@pytest.mark.parametrize("second", PLANS)
@pytest.mark.parametrize("first", ["alone", "pipeline", "3d"])
def test_there_and_back_under_all(first: str, second: str, tmp_path: Path) -> None:
    there_and_back(first, second, tmp_path / "run")


class Plain(nn.Module):
    """A model of somebody's, with an odd number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)


def fsdp_saves(folder: Path, rank: int) -> None:
    """Save as torchtitan and Lightning do: ranks have parts, the model is a section beside the optimizer."""
    torch.manual_seed(5)
    model = fully_shard(Plain(), mesh=init_device_mesh("cpu", (2,)))
    state = {"model": model.state_dict(), "optimizer": {"state": {"x": torch.ones(3)}}, "step": 7}
    dcp.save(state, checkpoint_id=folder)


def test_parts_of_ranks_are_read(tmp_path: Path) -> None:
    run_local_ranks(2, partial(fsdp_saves, tmp_path / "dcp"))
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 2
    torch.manual_seed(5)
    expected = Plain().state_dict()
    state = read_state_dict(tmp_path / "dcp")
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], expected[key]) for key in expected)
    assert main(["checkpoint", "convert", str(tmp_path / "dcp"), str(tmp_path / "ours"), "--to", "colossus"]) == 0
    ours = read_state_dict(tmp_path / "ours")
    assert all(torch.equal(ours[key], expected[key]) for key in expected)


class Harmful:
    def __reduce__(self) -> Any:
        return os.system, ("touch harmed",)


def saved(folder: Path, **state: Tensor) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def test_no_code_of_a_folder_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = saved(tmp_path / "dcp", weight=torch.ones(3))
    (folder / ".metadata").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(DamagedCheckpoint, match=r"it names posix.system, which describes no tensor"):
        read_state_dict(folder)
    assert not (tmp_path / "harmed").exists()


def test_damage_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "dcp", weight=torch.ones(300))
    (file,) = folder.glob("*.distcp")
    data = file.read_bytes()
    file.write_bytes(data[:-200])
    with pytest.raises(DamagedCheckpoint, match=rf"has {len(data) - 200} bytes of {len(data)}; take another"):
        read_state_dict(folder)
    file.write_bytes(b"\0" * len(data))
    with pytest.raises(CheckpointError, match="weight cannot be read"):
        read_state_dict(folder)
    file.unlink()
    with pytest.raises(DamagedCheckpoint, match="No such file"):
        read_state_dict(folder)
    with pytest.raises(CheckpointError, match=r"has no weights: its keys begin with optimizer\.x"):
        read_state_dict(saved(tmp_path / "other", **{"optimizer.x": torch.ones(2)}))
