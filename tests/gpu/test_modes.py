"""Every layer in every tensor mode on the device against plain torch in one process."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import layer_cases
from helpers.device_ranks import DeviceRanks
from helpers.modes import MODES, Mode
from helpers.ranks import grid, grid_of

from colossus.context.grid import LayerOptions
from colossus.context.parallel_context import ParallelContext
from colossus.registry import TENSOR_MODES

#: options of the layers under which nothing may change, with the mode in which they are tried
VARIANTS = {
    "2.5d_depth2 inputs kept": ("2.5d_depth2", dict(keep_gathered=True)),
    "3d weights kept for a step": ("3d", dict(weight_scope="step")),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in MODES} | VARIANTS


@pytest.mark.parametrize("name", sorted(CASES, key=lambda name: MODES[CASES[name][0]].world))
def test_a_mode(ranks: DeviceRanks, figures: Callable[[Any], None], name: str) -> None:
    mode, options = CASES[name]
    by_rank = ranks.run(MODES[mode].world, check_mode, MODES[mode], options)
    wrong: dict[str, str] = {}
    for layer, line in (entry for _, lines in by_rank for entry in lines):
        wrong.setdefault(layer, line)
    assert not wrong, f"{len(wrong)} of {len(layer_cases.CASES)} layers: {'; '.join([*wrong.values()][:4])}"
    gaps = [gaps for gaps, _ in by_rank]
    figures({key: max(of_rank[key] for of_rank in gaps) for key in gaps[0]})


def check_mode(
    rank: int, device: torch.device, mode: Mode, options: dict[str, Any]
) -> tuple[dict[str, float], list[tuple[str, str]]]:
    """Return the largest gap of each dtype over all layers, and what is wrong with which layer, on one rank."""
    shape = dict(zip(TENSOR_MODES.get(mode.name).axes, mode.shape, strict=True))
    layer_options = LayerOptions(tensor_mode=mode.name, sequence_sharded=mode.sequence_sharded, **options)
    context = ParallelContext(grid_of(data=mode.data, tensor=shape), rank, device=device, options=layer_options)
    alone = ParallelContext(grid(), device=device)
    gaps: dict[str, float] = {}
    wrong: list[tuple[str, str]] = []
    for name, case in layer_cases.CASES.items():
        for dtype, autocast in ((torch.float64, None), (torch.float32, None), (torch.float32, torch.bfloat16)):
            if autocast is not None and not case.has_low:
                continue
            try:
                gap = layer_cases.check(context, alone, name, dtype, autocast)
            except AssertionError as error:
                wrong.append((name, f"rank {rank}: {error}"))
            except Exception as error:  # most likely on all ranks; the other layers are tried, too
                traceback.print_exc()
                wrong.append((name, f"rank {rank}: {name}: {type(error).__name__}: {error}"))
            else:
                gaps = {key: max(value, gaps.get(key, 0.0)) for key, value in {**gaps, **gap}.items()}
    context.close()
    return gaps, wrong
