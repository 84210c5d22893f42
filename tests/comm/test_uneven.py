"""Collectives of parts of any length, through shared memory and through gloo."""

from __future__ import annotations

import pytest
import torch
from helpers import on_host
from helpers.ranks import run_ranks
from torch import Tensor

from colossus.comm import accounting, shared_memory, uneven
from colossus.context.parallel_context import ParallelContext

WORLD, DIM = 3, 5


def table_of(case: int) -> list[list[int]]:
    """Rows that each rank sends to each."""
    if case == 0:
        return [[0] * WORLD for _ in range(WORLD)]
    if case == 1:
        return [[0, 4, 0], [0, 0, 0], [1, 0, 2]]  # a rank without rows
    # more rows than a slot holds in all, and another number on each rank
    return [[700 * (source + 1) + 13 * to for to in range(WORLD)] for source in range(WORLD)]


def rows_of(source: int, to: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * source + to)
    return torch.randn(count, DIM, generator=generator, dtype=torch.float64)


def exchanged(context: ParallelContext, case: int, through_memory: bool) -> None:
    shared_memory.enable(through_memory)
    group, table = context.group("tensor"), table_of(case)
    me = group.index
    x = torch.cat([rows_of(me, to, count) for to, count in enumerate(table[me])])
    with accounting.count() as moved:
        lengths, words = uneven.agree(table[me], group, x.device, [me * 7, case])
        ids = torch.arange(len(x)) + 10_000 * me
        first, second = uneven.all_to_all(x, lengths, group), uneven.all_to_all(ids, lengths, group, "ids")
        received, received_ids = first.wait(), second.wait()
        back = uneven.all_to_all(received * 2, lengths.back, group, "answers").wait()
    assert words == [[rank * 7, case] for rank in range(WORLD)]
    assert torch.equal(received, torch.cat([rows_of(source, me, table[source][me]) for source in range(WORLD)]))
    starts = [sum(table[source][:me]) for source in range(WORLD)]
    wanted = [10_000 * source + starts[source] + i for source in range(WORLD) for i in range(table[source][me])]
    assert received_ids.tolist() == wanted
    assert torch.equal(back, x * 2)
    leaving = len(x) - table[me][me]
    assert moved.bytes("tensor", "all_to_all rows") == leaving * DIM * 8
    assert moved.bytes("tensor", "all_to_all ids") == leaving * 8
    assert moved.bytes("tensor", "all_to_all answers") == (len(received) - table[me][me]) * DIM * 8

    own = rows_of(me, 9, table[me][0])
    with accounting.count() as moved:
        gathered = uneven.all_gather(own, [row[0] for row in table], group).wait()
    assert torch.equal(gathered, torch.cat([rows_of(source, 9, table[source][0]) for source in range(WORLD)]))
    assert moved.bytes() == len(own) * DIM * 8 * (WORLD - 1)


def all_cases(context: ParallelContext, through_memory: bool, is_staged: bool) -> None:
    staged = on_host.pretend() if is_staged else on_host.ThroughHost
    for case in range(3):
        exchanged(context, case, through_memory)
    assert staged.copies == staged.returned == (15 if is_staged else 0)


@pytest.mark.parametrize("is_staged", [False, True], ids=["", "through the host"])
@pytest.mark.parametrize("through_memory", [True, False])
def test_every_part_arrives_and_what_leaves_is_counted(
    through_memory: bool, is_staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "SLOT_BYTES", 64 << 10)
    run_ranks(WORLD, all_cases, through_memory, is_staged)
