"""Replicas that go on without one: who they are then, and when they stop."""

from __future__ import annotations

import random
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import distributed as dist

from colossus.context.death_board import DEATH_STORE, connect
from colossus.context.grid import RankGrid
from colossus.context.parallel_context import ParallelContext
from colossus.engine.strategies import death_news
from colossus.engine.strategies.in_flight import InFlight
from colossus.engine.strategies.mass import Mass
from colossus.engine.strategies.stop_wave import StopWave
from colossus.launch import failure


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


@pytest.mark.parametrize("travels", [0, 2])
def test_the_living_know_what_push_sum_weight_is_left(travels: int) -> None:
    """One of five after the other dies, at steps at which the others have sent what they have not mixed yet."""
    generator = random.Random(7)
    living, masses, weights = list(range(5)), [Mass() for _ in range(5)], [1.0] * 5
    in_flight: dict[int, list[InFlight]] = {index: [] for index in living}
    for step in range(60):
        graph = {index: _shares(generator, index, living) for index in living}
        for index, shares in graph.items():
            masses[index].sends(weights[index], [each for each in shares.items() if each[0] != index])
            for to, share in shares.items():
                if to != index:
                    in_flight[to].append(InFlight(index, step, step + travels, share, weights[index]))
        if step % 13 == 12 and len(living) > 1:
            dead = living.pop(generator.randrange(len(living)))
            for index in living:  # some of what it had sent has not come
                theirs = [each for each in in_flight[index] if each.source == dead]
                last = [each for each in theirs if generator.random() < 0.5]
                in_flight[index] = [each for each in in_flight[index] if each not in theirs or each in last]
                graph[index][index] += graph[index].pop(dead, 0.0)
                masses[index].lose([dead], last)
            scale = len(living) / sum(masses[index].own for index in living)
            for index in living:
                masses[index].rescale(scale)
                weights[index] *= scale
                for each in in_flight[index]:
                    each.share *= scale
        for index in living:
            due = [each for each in in_flight[index] if each.due <= step]
            masses[index].mixes(due)
            weights[index] = graph[index][index] * weights[index] + sum(each.share * each.weight for each in due)
            in_flight[index] = [each for each in in_flight[index] if each not in due]
        if step == 30:  # stopped and gone on
            for index in living:
                masses[index].restart(weights[index], in_flight[index])
        total = sum(weights[index] + sum(each.share * each.weight for each in in_flight[index]) for index in living)
        assert total == pytest.approx(len(living), rel=1e-13)
    assert len(living) == 1


def _shares(generator: random.Random, index: int, living: list[int]) -> dict[int, float]:
    """What one keeps, and gives to some of the others; in all 1."""
    others = [other for other in living if other != index]
    weights = {to: generator.random() for to in generator.sample(others, generator.randint(0, len(others)))}
    weights[index] = 0.1 + generator.random()
    total = sum(weights.values())
    return {to: weight / total for to, weight in weights.items()}


def test_who_hears_of_deaths_looks_again_after_an_error_and_says_so_when_it_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without links and groups: the thread alone, whose store breaks once, and then for good."""

    class Board:
        answers: ClassVar[list[int | None]] = [0, None, 2]

        def num_deaths(self) -> int:
            number = self.answers.pop(0) if self.answers else None
            if number is None:
                raise RuntimeError("Broken pipe")
            return number

    monkeypatch.setattr(death_news, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(death_news, "_DEAF_SECONDS", 0.1)
    monkeypatch.setattr(death_news, "connect", lambda address, timeout: Board())
    monkeypatch.setenv(DEATH_STORE, "")
    context: Any = SimpleNamespace(
        timeout=timedelta(seconds=5), device=torch.device("cpu"), replica_axes=(), group=lambda axes: None
    )
    heard = threading.Event()
    news = death_news.DeathNews(context, heard.set)
    assert heard.wait(5.0)
    assert news.num_deaths == 2
    time.sleep(0.3)
    with pytest.raises(RuntimeError, match=r"store, .* has not answered for 0.1 s: Broken pipe") as error:
        news.require_hearing()
    assert failure.kind_of(error.value) == "communication"
    news.close()
