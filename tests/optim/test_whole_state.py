"""Experts as matrices of their own, under plans that spread them; and what is kept of whole tensors, saved under one
plan and taken under the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import assert_chain_is_one_process, contents
from helpers.experts import config_of_experts
from helpers.long import but
from helpers.training import batch_of
from helpers.whole_optimizers import OPTIMIZERS

from colossus.checkpoint.folder import name_of

CHAIN: list[tuple[int, dict[str, Any]]] = [
    (4, dict(data=2, tensor=2, expert=2)),
    (2, dict(data=2, expert=2, zero=3)),
    (4, dict(data=2, pipeline=2, expert=2)),
    (4, dict(tensor=dict(mode="2d", size=4), zero=0)),
    (1, dict()),
]


@pytest.mark.parametrize("name", but(("LAMB", "LARS", "Muon", "Adafactor"), OPTIMIZERS))
def test_each_plan_goes_on_as_one_process_would(name: str, tmp_path: Path) -> None:
    def config(plan: dict[str, Any]) -> dict[str, Any]:
        schedule = dict(type="1f1b" if "pipeline" in plan else "gpipe", microbatches=2)
        lr = dict(lr_schedule=dict(type="constant", warmup_steps=0), model=dict(num_kv_heads=2, positions="rotary"))
        return config_of_experts(plan, 50, schedule=schedule, **lr) | dict(optimizer=OPTIMIZERS[name][0])

    wanted = assert_chain_is_one_process(tmp_path, CHAIN, config, batch_of, rel=1e-9)
    assert abs(wanted[0][0] - wanted[-1][0]) > 1e-3
    last = contents(tmp_path / "4" / name_of(5))
    key = "optimizer_whole/blocks.1.mlp.experts.gate[3]"
    if name == "Adafactor":
        assert last.tensors[f"{key}/row_var"].shape == (20, 1)
    if name == "Shampoo":
        assert [factor.shape for factor in last.values[key]["factors"]] == [(20, 20), (24, 24)]
