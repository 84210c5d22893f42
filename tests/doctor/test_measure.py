"""``colossus doctor --measure``: ranks are timed together, and the file can be read."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.quick_measure import shorten

from colossus.cli.main import main
from colossus.doctor import measure, step_timing
from colossus.doctor.device_timing import OPERATORS, operands
from colossus.doctor.rank_timing import group_sizes
from colossus.hardware.hardware import OPERATIONS
from colossus.hardware.measured import Measured, load_measured
from colossus.machine import usable_cores
from colossus.planner.estimate import Estimator


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)


@pytest.mark.usefixtures("quick")
def test_three_ranks_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Collectives of two run beside a rank that has no neighbour; it waits for them."""
    path = tmp_path / "here.json"
    monkeypatch.setattr(measure, "ON_CPU", replace(measure.ON_CPU, steps=1))
    assert main(["doctor", "--nproc", "3", "--measure", str(path)]) == 0
    hardware = load_measured(path)
    file = hardware.file
    assert (file.ranks, file.device, file.backend) == (3, "cpu", "gloo")
    expected = {(operation, ranks) for operation in OPERATIONS for ranks in (2, 3)} - {("send", 3)}
    assert {(table.operation, table.ranks) for table in file.collectives} == expected
    sizes = {(table.operation, table.ranks): table.bytes for table in file.collectives}
    assert sizes["all_reduce", 2] == sizes["send", 2] == [1024, 4096]
    assert sizes["all_gather", 2] == [512, 2048]
    assert sizes["reduce_scatter", 3] == [1032, 4104]  # float32 that divide over three
    assert set(file.operator_bytes_per_second) == {*OPERATORS}
    assert 1e-7 < hardware.operator_seconds < 1e-2
    assert 0 < hardware.matmul_seconds(24, 24, 24, "fp32") < 1
    assert 0 < hardware.collective_seconds("all_to_all", 3, 2000) < 1
    out = capsys.readouterr().out
    assert ": 3 ranks at once, of 1 thread each, torch " in out
    assert re.search(rf"\n24 +{2 * 24**3 / file.matmul['fp32'].seconds[2][0] / 1e9:.1f}\n", out)
    assert "\n3 ranks, by the bytes of the whole tensor\n" in out
    factors = f"take {file.step_factor:.2f} times as long as by these tables, and bytes between ranks "
    assert f"\nin a training step operators {factors}{file.traffic_factor:.2f} times\n" in out
    assert 0 < file.step_factor != 1 != file.traffic_factor > 0
    assert out.endswith(f"written to {path}\n")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_planner_predicts_the_steps_that_were_measured(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_timing, "_measured_step", lambda config, *_: 2.0 + config.parallel.tensor.size)
    estimator = Estimator(Measured(measure.measure_ranks(ranks, "cpu", replace(measure.ON_CPU, steps=1))))
    replicas = min(ranks, usable_cores())
    batch = 16 * replicas
    replicated = step_timing._config(data=replicas, batch=batch)
    # of two ranks, whose sums then take longer by the other factor
    assert estimator.estimate(replicated).seconds == pytest.approx(3.0, rel=1e-6 if ranks == 1 else 0.1)
    if ranks == 2:
        assert estimator.estimate(step_timing._config(tensor=2, batch=batch)).seconds == pytest.approx(4.0)


@pytest.mark.long
def test_all_sizes_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    assert main(["doctor", "--measure", str(path)]) == 0
    file = load_measured(path).file
    assert {table.operation for table in file.collectives} == {*OPERATIONS}
    assert all(tuple(table.bytes)[-1] >= max(measure.ON_CPU.messages) // 2 for table in file.collectives)


@pytest.mark.usefixtures("quick")
def test_ranks_that_fail_are_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(*_: object) -> None:
        raise MemoryError("no room for the matmul")

    monkeypatch.setattr(measure, "time_cases", fails)
    assert main(["doctor", "--measure"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("colossus: nothing was measured: rank 0 failed\n")
    assert "no room for the matmul" in err


def test_a_file_that_cannot_be_written_is_refused_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--measure", str(tmp_path)]) == 2
    assert main(["doctor", "--measure", str(tmp_path / "none" / "a.json")]) == 2
    assert capsys.readouterr().err == (
        f"colossus: --measure {tmp_path}: is a folder\n"
        f"colossus: --measure {tmp_path}/none/a.json: no folder {tmp_path}/none\n"
    )


def test_operands_come_from_all_of_the_pool() -> None:
    """No two overlap; a pool that is too small for one set is repeated."""
    pool = torch.arange(100.0)
    sets = operands(pool, (2, 3), (4, 6))
    assert [[tuple(x.shape) for x in one] for one in sets] == [[(2, 3), (4, 6)]] * 3
    assert torch.cat([x.flatten() for one in sets for x in one]).tolist() == pool[:90].tolist()
    assert all(x.untyped_storage().data_ptr() == pool.data_ptr() for one in sets for x in one)  # no copies
    assert [x.numel() for one in operands(pool, (20, 11)) for x in one] == [220]


def test_sizes_of_groups() -> None:
    assert [group_sizes(world) for world in (1, 2, 3, 4, 6, 8)] == [[], [2], [2, 3], [2, 4], [2, 4, 6], [2, 4, 8]]
