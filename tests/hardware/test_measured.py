"""Answers between measured times: exact where measured, never less for more; and files that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossus.hardware.hardware import OPERATIONS, Link, fit_link
from colossus.hardware.interpolation import Curve, ProductGrid
from colossus.hardware.measured import Measured, MeasuredFile, MeasuredFileError, load_measured

SIZES = (8, 32, 100, 512)
BYTES = [1000, 4000, 70_000, 3_000_000]
seconds = st.floats(1e-7, 1e2)
dims = st.integers(1, 5000)


def file_of(products: list[list[float]] | None = None, collective: list[float] | None = None) -> dict[str, Any]:
    """A file with small tables: collectives of two and of four ranks, those of four at twice the time."""
    products = products or [[1e-6, 2e-6, 8e-6, 1e-4], [3e-6, 2e-5, 4e-4], [6e-5, 1e-3], [5e-3]]
    times = collective or [1e-5, 2e-5, 1e-4, 3e-3]
    collectives = [
        dict(operation=operation, ranks=ranks, bytes=BYTES, seconds=[ranks / 2 * taken for taken in times])
        for operation in OPERATIONS
        for ranks in (2, 4)
    ]
    attention = dict(
        heads=2, head_dim=64, lengths=[128, 512], forward_seconds=[1e-4, 1e-3], backward_seconds=[2e-4, 3e-3]
    )
    return dict(
        version=2, colossus="0", torch="2", device="cpu", name="a processor", cores=4, ranks=4, threads=1,
        backend="gloo", memory_bytes=1e9, bytes_per_second=5e9, copy_bytes_per_second=8e9, operator_seconds=1e-5,
        operator_bytes_per_second={"gelu": 2e9},
        matmul={"fp32": dict(sizes=list(SIZES), seconds=products)}, attention={"fp32": attention},
        collectives=collectives,
    )  # fmt: skip


def measured(network: Link | None = None, **tables: Any) -> Measured:
    return Measured(MeasuredFile.model_validate(file_of(**tables)), network)


# -- products -------------------------------------------------------------------------------------------------


@st.composite
def grids(draw: st.DrawFn) -> dict[tuple[int, int], float]:
    return {(a, b): draw(seconds) for a in SIZES for b in SIZES if b >= a}


@given(grids(), dims, dims, dims, st.integers(0, 2), st.integers(1, 3000))
def test_a_larger_product_never_takes_less(
    grid: dict[tuple[int, int], float], m: int, n: int, k: int, dim: int, more: int
) -> None:
    table = ProductGrid(SIZES, grid)
    larger = [m, n, k]
    larger[dim] += more
    assert table.at(*larger) >= table.at(m, n, k) * (1 - 1e-9)


@given(grids(), st.permutations([0, 1, 1]))
def test_products_are_exact_where_measured(grid: dict[tuple[int, int], float], order: list[int]) -> None:
    """Of those that took longer than a larger one it is the larger one's time, the smallest of all not below."""
    table = ProductGrid(SIZES, grid)
    for a, b in grid:
        least = min(taken for (c, d), taken in grid.items() if c >= a and d >= b)
        assert table.at(*((a, b)[which] for which in order)) == pytest.approx(least, rel=1e-12)
    assert table.at(512, 512, 512) == pytest.approx(grid[512, 512], rel=1e-12)


def test_products_outside_of_the_table() -> None:
    hardware = measured()
    assert hardware.matmul_seconds(1024, 512, 2048, "fp32") == pytest.approx(8 * 5e-3)  # the nearest efficiency
    assert hardware.matmul_seconds(32, 2048, 512, "fp32") == pytest.approx(4 * 4e-4)
    assert hardware.matmul_seconds(1, 1, 1, "fp32") == pytest.approx(1e-6)
    # halfway by logarithms: 16 of 8 .. 32 with 512 x 512, and 64 x 64 of 32 .. 100 for the others
    assert hardware.matmul_seconds(16, 512, 512, "fp32") == pytest.approx((1e-4 * 4e-4) ** 0.5)
    assert hardware.matmul_seconds(8, 16, 16, "fp32") == pytest.approx((1e-6 * 2e-6) ** 0.5)
    with pytest.raises(ValueError, match="has no times in bf16; it has fp32"):
        hardware.matmul_seconds(8, 8, 8, "bf16")


# -- collectives ----------------------------------------------------------------------------------------------


@given(
    st.lists(seconds, min_size=4, max_size=4),
    st.sampled_from(OPERATIONS),
    st.integers(2, 40),
    st.integers(1, 4),
    st.floats(0, 1e8),
    st.floats(0, 1e8),
)
def test_more_bytes_never_take_less(
    times: list[float], operation: str, ranks: int, hosts: int, held: float, more: float
) -> None:
    hardware = measured(Link(1e-5, 1e9), collective=times)
    less, longer = (hardware.collective_seconds(operation, ranks, size, hosts=hosts) for size in (held, held + more))
    assert longer >= less * (1 - 1e-9)
    assert less > 0


def test_collectives_between_and_outside_of_what_was_measured() -> None:
    hardware = measured()
    assert [hardware.collective_seconds("all_reduce", 2, held) for held in BYTES] == pytest.approx(
        [1e-5, 2e-5, 1e-4, 3e-3]
    )
    assert hardware.collective_seconds("all_reduce", 2, 2000) == pytest.approx((1e-5 * 2e-5) ** 0.5)
    assert hardware.collective_seconds("all_reduce", 2, 8) == pytest.approx(1e-5)
    assert hardware.collective_seconds("all_reduce", 1, 8) == 0
    link = next(t for t in hardware.file.collectives if (t.operation, t.ranks) == ("all_reduce", 2)).link()
    assert hardware.collective_seconds("all_reduce", 2, 5e6) == pytest.approx(3e-3 + 2e6 / link.bandwidth)
    # three ranks lie log 1.5 / log 2 of the way from two to four, which take twice as long
    assert hardware.collective_seconds("all_gather", 3, 4000) == pytest.approx(2e-5 * 1.5)
    # eight pass on seven shards, four three
    four = next(t for t in hardware.file.collectives if (t.operation, t.ranks) == ("all_gather", 4)).link()
    assert hardware.collective_seconds("all_gather", 8, 4000) == pytest.approx(
        4e-5 + (7 / 3 - 1) * four.latency + 4 * 4000 / four.bandwidth
    )
    with pytest.raises(ValueError, match=r"'gather' is no operation that can be timed; choose one of all_reduce, "):
        hardware.collective_seconds("gather", 2, 8)


def test_a_network_is_given_not_guessed() -> None:
    with pytest.raises(ValueError, match=r"has no network, and all_reduce over 2 hosts needs one: pass network="):
        measured().collective_seconds("all_reduce", 4, 4000, hosts=2)
    slow = measured(Link(1e-3, 1e6))
    assert slow.collective_seconds("reduce_scatter", 4, 4000, hosts=2) == pytest.approx(1500 / 1e6 + 1e-3)
    fast = measured(Link(0, 1e15))
    assert fast.collective_seconds("all_reduce", 4, 4000, hosts=2) == pytest.approx(4e-5)


@given(st.floats(1e-6, 1e-2), st.floats(1e6, 1e12))
def test_a_fit_finds_latency_and_bandwidth(latency: float, bandwidth: float) -> None:
    sizes = [bandwidth * latency * times for times in (0.01, 0.3, 1, 7, 100)]
    link = fit_link([(size, latency + size / bandwidth) for size in sizes])
    assert (link.latency, link.bandwidth) == pytest.approx((latency, bandwidth), rel=1e-6)


def test_a_fit_has_no_latency_below_zero() -> None:
    """Where large messages take another, slower way."""
    assert fit_link([(1.0, 1.0), (10.0, 100.0)]).latency == 0
    assert fit_link([(1.0, 5.0), (10.0, 4.0)]).bandwidth > 0


# -- the rest -------------------------------------------------------------------------------------------------


def test_attention_and_memory() -> None:
    hardware = measured()
    assert hardware.attention_seconds(2, 512, 64, "fp32") == pytest.approx(1e-3)
    assert hardware.attention_seconds(4, 1024, 128, "fp32", backward=True) == pytest.approx(4 * 4 * 3e-3)
    assert hardware.memory_seconds(1e9) == hardware.memory_seconds(1e9, "add") == pytest.approx(0.2)
    assert hardware.memory_seconds(1e9, "gelu") == pytest.approx(0.5)


def test_operators_of_a_processor_add_to_their_work_and_those_of_a_gpu_run_ahead() -> None:
    assert measured().eager_seconds(3e-5, 10) == pytest.approx(1.3e-4)
    gpu = Measured(MeasuredFile.model_validate(file_of() | {"device": "cuda"}))
    assert (gpu.eager_seconds(3e-5, 10), gpu.eager_seconds(3e-4, 10)) == (pytest.approx(1e-4), 3e-4)
    assert (measured().overlaps, gpu.overlaps) == (False, True)


def test_a_measured_step_scales_what_a_rank_computes_and_no_collective() -> None:
    parts, step = measured(), Measured(MeasuredFile.model_validate(file_of() | {"step_factor": 1.5}))

    def computed(machine: Measured) -> list[float]:
        attention = [machine.attention_seconds(2, 512, 64, "fp32", backward=backward) for backward in (False, True)]
        memory = [machine.memory_seconds(1e6, operator) for operator in ("gelu", "add")]
        return [machine.matmul_seconds(64, 64, 64, "fp32"), *attention, *memory, machine.eager_seconds(0.0, 10)]

    assert computed(step) == pytest.approx([1.5 * seconds for seconds in computed(parts)])
    assert step.collective_seconds("all_reduce", 4, 4000) == parts.collective_seconds("all_reduce", 4, 4000)


def test_a_measured_step_scales_the_bytes_of_collectives_and_not_their_latency() -> None:
    parts, step = measured(), Measured(MeasuredFile.model_validate(file_of() | {"traffic_factor": 3.0}))
    small, large = (
        [machine.collective_seconds("all_reduce", 4, size) for machine in (parts, step)] for size in (1, 4e6)
    )
    assert small[0] == pytest.approx(small[1])
    assert large[1] - small[1] == pytest.approx(3 * (large[0] - small[0]))


def test_ranks_that_share_cores() -> None:
    """What was measured between twice as many ranks as cores is told as of ranks with a core each."""
    alone, shared = measured(), Measured(MeasuredFile.model_validate(file_of() | {"cores": 2}))
    assert [alone.slowdown(ranks) for ranks in (1, 4, 8)] == [1, 1, 2]
    assert [shared.slowdown(ranks) for ranks in (1, 4, 8)] == [1, 2, 4]
    assert shared.matmul_seconds(8, 8, 8, "fp32") == alone.matmul_seconds(8, 8, 8, "fp32")
    seconds = [machine.collective_seconds("all_reduce", 4, 4000) for machine in (alone, shared)]
    assert seconds[0] == pytest.approx(2 * seconds[1])
    assert Measured(MeasuredFile.model_validate(file_of() | {"device": "cuda"})).slowdown(64) == 1


@given(st.lists(seconds, min_size=3, max_size=3), st.floats(0.1, 1e4), st.floats(1, 10))
def test_curves_rise(taken: list[float], size: float, factor: float) -> None:
    curve = Curve([1, 30, 700], taken)
    assert curve.at(size * factor) >= curve.at(size) * (1 - 1e-9)
    assert curve.at(700) == pytest.approx(taken[-1], rel=1e-12)


# -- files ----------------------------------------------------------------------------------------------------


def test_a_file_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    path.write_text(MeasuredFile.model_validate(file_of()).model_dump_json())
    found = load_measured(path)
    assert found.file == measured().file
    assert (found.name, found.is_measured) == ("a processor (measured, 4 ranks at once)", True)


def _without(*keys: Any) -> dict[str, Any]:
    file = file_of()
    inner: Any = file
    for key in keys[:-1]:
        inner = inner[key]
    del inner[keys[-1]]
    return file


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", r"cannot be read as a file of measured times \("),
        ("[1]", "is not a file of measured times: it has no 'version'"),
        (file_of() | {"version": 1}, "has version 1, this colossus reads 2; `colossus doctor --measure OUT.json`"),
        (_without("matmul"), "'matmul' is missing;"),
        (_without("attention", "fp32", "heads"), "'attention.fp32.heads' is missing;"),
        (file_of() | {"speed": 1}, "'speed' is no key of such a file"),
        (file_of([[1.0] * 4, [1.0] * 3, [1.0], [1.0]]), r"rows of seconds have \[4, 3, 1, 1\] numbers; 4 sizes need"),
        (file_of(collective=[1.0]), r"collectives.0: seconds has 1 numbers for 4 bytes; collectives.1: "),
        (file_of(collective=[1.0, 1.0, 0.0, 1.0]), r"collectives.0.seconds.2: Input should be greater than 0"),
        (file_of() | {"collectives": [dict(operation="sum", ranks=2, bytes=[1, 2], seconds=[1, 2])]}, "'sum' is none"),
    ],
)  # fmt: skip
def test_files_of_another_shape_are_refused(tmp_path: Path, content: Any, words: str) -> None:
    path = tmp_path / "measured.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(MeasuredFileError, match=words):
        load_measured(path)
    with pytest.raises(MeasuredFileError, match="cannot be read"):
        load_measured(tmp_path / "nothing.json")


def test_a_machine_measured_with_one_rank_knows_no_collectives() -> None:
    alone = Measured(MeasuredFile.model_validate(file_of() | {"collectives": [], "ranks": 1}))
    with pytest.raises(ValueError, match=r"1 rank at once\) has no times of send between ranks: .* --nproc 2 or more"):
        alone.collective_seconds("send", 2, 8)
