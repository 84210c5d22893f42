"""What travels beside blocks that run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossus.planner.beside import BlockSeconds, run_beside

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
