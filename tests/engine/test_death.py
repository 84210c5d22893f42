"""Replicas that go on without one: who they are then, and when they stop."""

from __future__ import annotations

from datetime import timedelta

from torch import distributed as dist

from colossus.context.death_board import connect
from colossus.context.grid import RankGrid
from colossus.context.parallel_context import ParallelContext
from colossus.engine.strategies.stop_wave import StopWave


def test_ranks_that_live_are_numbered_anew() -> None:
    grid = RankGrid({"pipeline": 1, "data": 3, "sequence": 1, "tensor": 2}, {"data": ("data",), "tensor": ("tensor",)})
    context = ParallelContext(grid, 5, connect=False)
    assert (context.living.grid, context.living.rank) == (grid, 5)
    context.ranks = (0, 1, 4, 5)
    place = context.living
    assert (place.rank, place.index("data"), place.size("data"), place.index("tensor")) == (3, 1, 2, 1)
    assert not context.is_logging_rank
    context.ranks = (4, 5)
    assert ParallelContext(grid, 4, connect=False).is_logging_rank is False


def test_replicas_that_go_on_stop_after_the_same_step() -> None:
    """One knew of a stop that another, through whom it would have heard of it, took along."""
    one, other = StopWave(3), StopWave(3)
    one.wish(5, 2.0)
    for wave in (one, other):
        wave.agree([known for known in (one.known, other.known) if known], 10, 2)
    assert one.known == other.known == (10, 2.0)
    early = StopWave(0)
    early.wish(8, 2.0)
    one.hear(early.pack(), 8)  # of before the death, and still on its way: the other may never get it
    assert one.known == (10, 2.0)
    assert other.due(9) == 0.0
    assert other.due(10) == 2.0


def test_the_board_decides_once() -> None:
    server = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    board = connect(f"127.0.0.1:{server.port}", timedelta(seconds=10))
    board.decide("1.0", "open")
    board.decide("1.0", "3")
    assert board.decision("1.0") == "open"
    assert board.decision("1.1") is None
    assert [board.claim(2), board.claim(2), board.claim(1)] == [True, False, True]
    assert board.answers(1, [0, 2]) is None
    board.answer(1, 0, {"step": 4})
    board.answer(1, 2, {"step": 6})
    assert board.answers(1, [0, 2]) == [{"step": 4}, {"step": 6}]
    assert board.settlement(1) is None
