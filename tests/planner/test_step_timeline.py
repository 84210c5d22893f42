"""What travels beside blocks that run, and what a device does beside its host."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossus.context.grid import RankGrid
from colossus.hardware.data_sheets import GAP, FromDataSheet
from colossus.hardware.host_placement import Placement
from colossus.planner.step_timeline import BlockSeconds, run_beside
from colossus.planner.trace import Awaited, Event, Operator, Started, Trace
from colossus.planner.trace_seconds import TracePlayer

seconds = st.floats(0, 10)
runs = st.lists(st.builds(BlockSeconds, seconds, seconds, seconds), min_size=1, max_size=6)


@given(runs)
def test_it_is_never_faster_than_what_runs_or_travels(blocks: list[BlockSeconds]) -> None:
    done, sent = run_beside(blocks, overlaps=True)
    computing = sum(block.computing for block in blocks)
    travelling = sum(block.arriving + block.leaving for block in blocks)
    alone, _ = run_beside(blocks, overlaps=False)
    assert done >= computing - 1e-9
    assert sent >= max(done, travelling) - 1e-9
    assert sent <= alone + 1e-9
    assert alone == pytest.approx(computing + travelling)


def test_the_next_arrives_while_a_block_runs() -> None:
    blocks = [BlockSeconds(3.0, 1.0), BlockSeconds(3.0, 2.0), BlockSeconds(1.0, 5.0)]
    assert run_beside(blocks, overlaps=True) == (10.0, 10.0)  # 1, then 3, then 5 instead of 3, then 1


def test_what_leaves_goes_on_behind_the_last() -> None:
    blocks = [BlockSeconds(2.0, leaving=1.0), BlockSeconds(2.0, leaving=4.0)]
    assert run_beside(blocks, overlaps=True) == (4.0, 8.0)


def _played(*events: Event) -> float:
    return TracePlayer(FromDataSheet("h100"), Placement(RankGrid({"data": 8}), hosts=1)).play(Trace(events)).seconds


def test_the_host_of_a_gpu_waits_for_no_collective() -> None:
    small = [Operator(1.0)] * 100
    start, wait = Started(1, "all_gather", "data", 1e8), Awaited(1)
    travelling = _played(start, wait)
    queueing = _played(*small)  # a kernel each 10 us, and the last one
    assert queueing == pytest.approx(99 * 10e-6 + GAP, rel=0.01)
    # meanwhile as many are queued: they run without a pause
    assert _played(start, wait, *small) == pytest.approx(travelling + 100 * GAP, rel=0.01)


def test_a_collective_takes_a_part_of_the_device_from_what_runs_beside_it() -> None:
    long, start, wait = Operator(1e11), Started(1, "all_gather", "data", 1e8), Awaited(1)
    alone, travelling = _played(long), _played(start, wait)
    assert _played(start, long, wait) == pytest.approx(alone + 0.15 * travelling)
