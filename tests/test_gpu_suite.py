"""`tests/gpu` without a GPU: its bodies on devices that do not exist, its ranks when they fail, and its command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu import test_precisions, test_waits
from helpers import layer_cases, on_host, staged_bodies
from helpers.device_ranks import DeviceRanks
from helpers.fake_cuda import Waits, run_fake_ranks
from helpers.ranks import grid, grid_of, run_ranks

from colossus.context.grid import LayerOptions
from colossus.context.local_ranks import RanksFailed
from colossus.context.parallel_context import ParallelContext

ROOT = Path(__file__).resolve().parent.parent

# -- ranks that fail --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks() -> Iterator[DeviceRanks]:
    pools = DeviceRanks(torch.device("cpu"))
    yield pools
    pools.close()


def fail(rank: int, device: torch.device, how: str) -> int:
    if how == "raise":
        raise AssertionError("12.5 is not 13")
    if how == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "leave":
        os._exit(7)
    return os.getpid()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("how", "message"), [("raise", "12.5 is not 13"), ("crash", rf"{-signal.SIGKILL}\b"), ("leave", r"\b7\b")]
)
def test_a_body_that_fails_costs_its_own_test(ranks: DeviceRanks, world: int, how: str, message: str) -> None:
    first = ranks.run(world, fail, "not")
    assert ranks.run(world, fail, "not") == first  # the same processes
    with pytest.raises(RanksFailed, match=message):
        ranks.run(world, fail, how)
    assert not set(first) & set(ranks.run(world, fail, "not"))


def hang(rank: int, device: torch.device) -> None:
    while True:  # a kernel that never ends keeps the processor busy, too
        pass


def test_a_body_that_hangs_is_ended_with_its_stacks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("helpers.device_ranks.BODY_SECONDS", 0.3)
    pools = DeviceRanks(torch.device("cpu"))
    with pytest.raises(RanksFailed, match="ended without an answer, with exit codes"):
        pools.run(1, hang)
    assert "in hang" in capfd.readouterr().err


# -- bodies on devices that do not exist ------------------------------------------------------------------------------

DTYPES = ((torch.float64, None), (torch.float32, torch.bfloat16), (torch.float16, None))
PLANS = {
    "one rank": ("1d", grid(), DTYPES),
    "1d": ("1d", grid(tensor=2), DTYPES[1:2]),
    "2d": ("2d", grid_of({"row": 2, "col": 3}), DTYPES),
}


def compute_layers(rank: int, mode: str, plan: Any, dtypes: Any) -> int:
    context = ParallelContext(plan, rank, device="cuda:0", options=LayerOptions(tensor_mode=mode))
    count = 0
    for name, case in layer_cases.CASES.items():
        for dtype, autocast in dtypes:
            try:
                result, parameters = layer_cases.compute(context, case, dtype, autocast)
                if case.plain is not None:
                    layer_cases.compute_plain(context.device, case, parameters)
            except Exception as error:
                error.add_note(f"{name}, {dtype}, autocast {autocast}")
                raise
            count += len(result)
    return count


@pytest.mark.long
@pytest.mark.parametrize("name", PLANS)
def test_every_layer_case(name: str) -> None:
    mode, plan, dtypes = PLANS[name]
    (count,) = run_fake_ranks(plan.world_size, compute_layers, mode, plan, dtypes)
    assert count > 2 * len(layer_cases.CASES)


def run_steps(rank: int, names: tuple[str, ...]) -> list[str]:
    modes: list[str] = []
    torch.cuda.set_sync_debug_mode = modes.append  # type: ignore[assignment]
    device = torch.device("cuda", 0)
    for name in names:
        precision, more = test_waits.CONFIGS[name]
        engine = test_waits.make_engine(precision, **more)
        batch = test_waits.make_batch(device)
        engine.train_step(batch)
        with Waits(allowed=True) as waits:
            engine.train_step(batch)
        assert not waits.found, f"{name}: {waits.found}"
        engine.close()
    with test_waits.no_waits():
        pass
    engine = test_precisions.make_engine(device, "fp16")
    engine.train_step(test_precisions.make_batch(device, 0))
    return modes


@pytest.mark.long
@pytest.mark.parametrize("names", [("bf16", "fp16"), tuple(test_waits.CONFIGS)], ids=len)
def test_the_steps_whose_waits_are_counted(names: tuple[str, ...]) -> None:
    """The configs whose steps may not wait on a real device wait for no fake one."""
    assert run_fake_ranks(1, run_steps, names) == [["error", "default"]]


def run_staged(rank: int) -> int:
    staged = on_host.pretend()
    for body in (*staged_bodies.BODIES.values(), *staged_bodies.ORDERED.values()):
        for shared in (True, False):
            staged_bodies.run_body(rank, torch.device("cpu"), body, shared)
    return staged.copies


@pytest.mark.long
def test_what_ranks_on_one_device_exchange() -> None:
    """Ranks exchange tensors of the CPU that are staged as those of a device."""
    assert min(run_ranks(staged_bodies.WORLD, run_staged, with_context=False)) > 200


# -- the command ------------------------------------------------------------------------------------------------------


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "scripts" / "test-gpu"), *arguments], capture_output=True, text=True, timeout=500, check=False,
        env={**os.environ, "INSTALL": "no", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.long
def test_the_command_without_a_device(tmp_path: Path) -> None:
    done = run_command("--device", "cpu", "-k", "test_device or test_nccl", "--report", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing of this was run on a GPU" in done.stdout
    about, *rows = map(json.loads, (tmp_path / "gpu.jsonl").read_text().splitlines())
    assert about["device"] == "cpu"
    outcomes = {row["test"].rpartition("::")[2]: row["outcome"] for row in rows}
    assert outcomes["test_the_device_is_described"] == "skipped"
    assert outcomes["test_a_product_is_exact"] == outcomes["test_one_rank[collectives]"] == "passed"


@pytest.mark.long
def test_the_budget(tmp_path: Path) -> None:
    done = run_command("--device", "cpu", "-k", "test_a_product", "--report", str(tmp_path), "--budget", "0")
    assert "no time is left of 0 s: give more with --budget" in done.stdout
