"""The plain module's state dict: streamed from an engine, and out of a folder without processes."""

from __future__ import annotations

import shutil
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.training import BATCH, SIZES, batch_of, config_of
from helpers.twins import PlainGPT
from torch import Tensor

import colossus
from colossus.checkpoint import (
    CheckpointError,
    full_state_dict,
    read_state_dict,
    stream_saved_state_dict,
    stream_state_dict,
)
from colossus.state import model_state_dict

PLANS: dict[str, dict[str, Any]] = {
    "pipeline_1d": dict(parallel=dict(pipeline=2, tensor=2), schedule=dict(microbatches=2)),
    "zero3_sequence": dict(parallel=dict(data=2, sequence=2, zero=3)),
    "2d": dict(parallel=dict(tensor=dict(mode="2d", size=4))),
}


def _streams(rank: int, plans: dict[str, Any], root: str) -> dict[str, float]:
    """Under each plan: what is streamed is the full state dict, on rank 0. Saves, and returns the evaluation loss."""
    losses = {}
    for title, plan in plans.items():
        engine = colossus.initialize(config_of({}, 1, "fp64", checkpoint=dict(dir=f"{root}/{title}"), **plan))
        model, context = engine.model, engine.context
        index, part = context.index("data"), BATCH // context.size("data")
        mine = {key: value[index * part : (index + 1) * part] for key, value in batch_of(0).items()}
        engine.train_step(mine)
        wanted = full_state_dict(model, context)

        alive: list[weakref.ref[Tensor]] = []
        whole = model_state_dict._whole_of_stage

        def counted(*args: Any, alive: Any = alive, whole: Any = whole) -> Tensor:
            until = time.monotonic() + 10.0  # gloo's thread lets go a moment later
            while (num_alive := sum(reference() is not None for reference in alive)) > 1 and time.monotonic() < until:
                time.sleep(0.001)
            assert num_alive <= 1, f"{num_alive} whole tensors are still held"
            out = whole(*args)
            alive.append(weakref.ref(out))
            return out

        model_state_dict._whole_of_stage = counted
        streamed: dict[str, Tensor] = {}
        ties: dict[str, int] = {}
        for name, value in stream_state_dict(model, context):
            streamed[name] = value.clone()
            ties[name] = id(value)
            del value
        model_state_dict._whole_of_stage = whole
        assert len(alive) == len(wanted) - 1
        if rank == 0:
            assert streamed.keys() == wanted.keys()
            assert all(torch.equal(streamed[name], value) for name, value in wanted.items())
            assert ties["head.weight"] == ties["embedding.weight"]
            names = [name for name in streamed if name != "head.weight"]
            assert names == [name for name in wanted if name != "head.weight"]
        else:
            assert not streamed
        order = ["norm.weight", "embedding.weight"]
        names = [name for name, _ in stream_state_dict(model, context, order=order)]
        assert names == (order if rank == 0 else [])

        engine.checkpoints.save(background=False).wait()
        losses[title] = engine.eval_step(mine).loss
        engine.close()
    return losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    root = tmp_path_factory.mktemp("saved")
    return root, run_ranks(4, _streams, PLANS, str(root), with_context=False)[0]


@pytest.mark.parametrize("plan", PLANS)
def test_plain_torch_takes_what_was_saved(plan: str, saved: tuple[Path, dict[str, float]]) -> None:
    """With strict=True: the names are those of plain torch. And it computes the same."""
    root, losses = saved
    twin = PlainGPT(**SIZES).double()
    state = read_state_dict(root / plan)
    twin.load_state_dict(state, strict=True)
    assert state["head.weight"] is state["embedding.weight"]
    total, count = twin.loss_sum(*batch_of(0).values())
    assert (total / count).item() == pytest.approx(losses[plan], rel=1e-12)


def test_out_of_a_folder_one_by_one(saved: tuple[Path, dict[str, float]]) -> None:
    folder = saved[0] / "2d"
    whole = read_state_dict(folder)
    for name, value in stream_saved_state_dict(folder, verify=False):
        assert torch.equal(value, whole[name])
    names = [*whole]
    assert names.index("blocks.0.mlp.up.weight") < names.index("blocks.1.attention.out.bias")
    assert {*read_state_dict(folder, only=["blocks.1.mlp.*"])} == {name for name in names if "blocks.1.mlp." in name}
    assert [*read_state_dict(folder, only=["head.*"])] == ["head.weight"]


def test_what_is_wrong_is_told_before_anything_is_read(saved: tuple[Path, dict[str, float]], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'block\.\*' matches no name"):
        stream_saved_state_dict(saved[0] / "2d", only=["block.*"])
    with pytest.raises(CheckpointError, match="there is no such folder"):
        read_state_dict(tmp_path / "absent")
    folder = saved[0] / "2d" / "step-00000001"
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    name = "rank-00002.safetensors"
    data = bytearray((copy / name).read_bytes())
    data[-5] ^= 4
    (copy / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{name} is corrupted"):
        stream_saved_state_dict(copy)
    assert len(read_state_dict(copy, verify=False)) == len(read_state_dict(folder))
