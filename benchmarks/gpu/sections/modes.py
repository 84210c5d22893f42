"""Every layer in every tensor mode, its ranks on one device, against the same layer in one process on the CPU."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from functools import partial

import torch
from helpers.modes import MODES, Mode
from helpers.ranks import grid_of

from benchmarks.gpu import layer_cases
from benchmarks.gpu.ranks import RankPool
from benchmarks.gpu.section import Case, Figures
from colossus.context.grid import LayerOptions
from colossus.context.parallel_context import ParallelContext
from colossus.registry import TENSOR_MODES

#: options of the layers under which nothing may change, with the mode in which they are tried
VARIANTS = {
    "2.5d_depth2 inputs kept": ("2.5d_depth2", dict(keep_gathered=True)),
    "3d weights kept for a step": ("3d", dict(weight_scope="step")),
}


def cases(device: torch.device, budget: float) -> Iterator[Case]:
    pool = RankPool(device)
    chosen = {name: (name, dict[str, bool | str]()) for name in MODES} | VARIANTS
    for name in sorted(chosen, key=lambda name: MODES[chosen[name][0]].world):
        mode, options = chosen[name]
        yield Case(name, partial(check_mode, pool, MODES[mode], options), seconds=90)
    pool.close()


def check_mode(pool: RankPool, mode: Mode, options: dict[str, bool | str]) -> Figures:
    """The largest gap of each dtype over all layers and ranks."""
    by_rank = pool.run(mode.world, _check, mode, options)
    wrong: dict[str, str] = {}
    for name, line in (each for _, lines in by_rank for each in lines):
        wrong.setdefault(name, line)
    assert not wrong, f"{len(wrong)} of {len(layer_cases.CASES)} layers: {'; '.join([*wrong.values()][:4])}"
    found = [gaps for gaps, _ in by_rank]
    return {"layers": len(layer_cases.CASES), **{key: max(gaps[key] for gaps in found) for key in found[0]}}


def _check(
    rank: int, device: torch.device, mode: Mode, options: dict[str, bool | str]
) -> tuple[dict[str, float], list[tuple[str, str]]]:
    """Of one rank: largest gaps, and what is wrong with which layer."""
    shape = dict(zip(TENSOR_MODES.get(mode.name).axes, mode.shape, strict=True))
    of_layers = LayerOptions(tensor_mode=mode.name, sequence_sharded=mode.sequence_sharded, **options)  # type: ignore[arg-type]
    context = ParallelContext(grid_of(data=mode.data, tensor=shape), rank, device=device, options=of_layers)
    gaps: dict[str, float] = {}
    wrong: list[tuple[str, str]] = []
    for name, case in layer_cases.CASES.items():
        for dtype, autocast in ((torch.float64, None), (torch.float32, None), (torch.float32, torch.bfloat16)):
            if autocast is not None and not case.has_low:
                continue
            try:
                found = layer_cases.check(context, name, dtype, autocast)
            except AssertionError as error:
                wrong.append((name, f"rank {rank}: {error}"))
            except Exception as error:  # most likely on all ranks; the other layers are to be tried, too
                traceback.print_exc()
                wrong.append((name, f"rank {rank}: {name}: {type(error).__name__}: {error}"))
            else:
                gaps = {key: max(gap, gaps.get(key, 0.0)) for key, gap in {**gaps, **found}.items()}
    context.close()
    return gaps, wrong
