"""The sections of ``scripts/test-gpu`` on devices that do not exist: what they do puts no tensor in a wrong place."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import on_host
from helpers.fake_cuda import Waits, run_fake_ranks
from helpers.ranks import grid, grid_of, run_ranks

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the benchmarks are no part of the installed package

from benchmarks.gpu import layer_cases  # noqa: E402
from benchmarks.gpu.sections import precisions, staging, waits  # noqa: E402
from colossus.context.grid import LayerOptions  # noqa: E402
from colossus.context.parallel_context import ParallelContext  # noqa: E402

DTYPES = ((torch.float64, None), (torch.float32, torch.bfloat16), (torch.float16, None))


def _computed(rank: int, mode: str, plan: Any, dtypes: Any) -> int:
    context = ParallelContext(plan, rank, device="cuda:0", options=LayerOptions(tensor_mode=mode))
    count = 0
    for name, case in layer_cases.CASES.items():
        for dtype, autocast in dtypes:
            try:
                found = layer_cases.computed(context, case, dtype, autocast)
            except Exception as error:
                error.add_note(f"{name}, {dtype}, autocast {autocast}")
                raise
            count += len(found)
    return count


PLANS = {
    "one rank": ("1d", grid(), DTYPES),
    "1d": ("1d", grid(tensor=2), DTYPES[1:2]),
    "2d": ("2d", grid_of({"row": 2, "col": 3}), DTYPES),
}


@pytest.mark.long
@pytest.mark.parametrize("name", PLANS)
def test_every_layer_case(name: str) -> None:
    mode, plan, dtypes = PLANS[name]
    (count,) = run_fake_ranks(plan.world_size, _computed, mode, plan, dtypes)
    assert count > 2 * len(layer_cases.CASES)


def _steps(rank: int, names: tuple[str, ...]) -> list[str]:
    modes: list[str] = []
    torch.cuda.set_sync_debug_mode = modes.append  # type: ignore[assignment]
    for name in names:
        precision, more = waits.CONFIGS[name]
        engine = waits._engine(torch.device("cuda", 0), precision, **more)
        batch = waits._batch(torch.device("cuda", 0))
        engine.train_step(batch)
        with Waits(allowed=True) as found:
            engine.train_step(batch)
        assert not found.found, f"{name}: {found.found}"
        engine.close()
    with waits._no_waits():
        pass
    engine = precisions.engine_of(torch.device("cuda", 0), "fp16")
    engine.train_step(precisions.batch(torch.device("cuda", 0), 0))
    return modes


@pytest.mark.long
@pytest.mark.parametrize("names", [("bf16", "fp16"), tuple(waits.CONFIGS)], ids=len)
def test_the_steps_whose_waits_are_counted(names: tuple[str, ...]) -> None:
    """The same configs under which a real device is to be waited for by nobody."""
    assert run_fake_ranks(1, _steps, names) == [["error", "default"]]


def _staged(rank: int) -> int:
    staged = on_host.pretend()
    for body in (staging.every_collective, staging.messages, *staging.ORDERED.values()):
        for shared in (True, False):
            staging.in_context(rank, torch.device("cpu"), body, shared)
    return staged.copies


@pytest.mark.long
def test_what_ranks_on_one_device_exchange() -> None:
    """The same calls and values, with tensors of the CPU that are staged."""
    assert min(run_ranks(staging.WORLD, _staged, with_context=False)) > 200
