"""Tables that are kept in rows by their owners: against one process, and what leaves a rank or a host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.long import long
from helpers.ranks import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.comm import accounting
from colossus.gradients.bucket_sum import BETWEEN
from colossus.sparse.owners import Placement

ROWS, DIM, CLASSES, SAMPLES, LENGTH, STEPS = 37, 6, 5, 8, 3, 3


class Block(nn.Module):
    """Looks up twice: what is computed again in backward must find the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = layers.Embedding(ROWS, DIM, padding_idx=2, sparse=True)
        self.plain = nn.Embedding(ROWS, DIM, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.table(ids) + self.plain(ids // 2) * self.table(ids // 3))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.out = layers.Linear(DIM, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.block(ids).mean(1))


def loss_fn(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(outputs, batch[1], reduction="sum"), len(outputs)


def batch_of(step: int, samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, ROWS, (samples, LENGTH), generator=generator)
    ids[: samples // 4] = 5  # one rank has one id alone
    return ids, torch.randint(0, CLASSES, (samples,), generator=generator)


def engine_of(
    data: int, microbatches: int = 1, checkpoint: str = "none", through_memory: bool = True, **strategy: Any
) -> colossus.engine.Engine:
    strategy = {"type": "hybrid", "ways": {"*": "owners"}, **strategy}
    chosen = {key: value for key, value in strategy.items() if value is not None} if data > 1 else "all_reduce"
    modules = dict(modules=["block"]) if checkpoint != "none" else {}
    config = dict(
        parallel=dict(data=data, strategy=chosen),
        optimizer=dict(type="Adagrad", lr=0.3),
        schedule=dict(microbatches=microbatches),
        comm=dict(shared_memory=through_memory),
        train=dict(
            steps=STEPS,
            global_batch_size=SAMPLES,
            precision="fp64",
            clip_grad_norm=0.5,
            activation_checkpoint=dict(type=checkpoint, **modules),
        ),
    )
    return colossus.initialize(config, model=Words, loss_fn=loss_fn)


def own(batch: tuple[Tensor, Tensor], engine: colossus.engine.Engine) -> tuple[Tensor, Tensor]:
    index, share = engine.context.index("data"), len(batch[0]) // engine.context.size("data")
    ids, labels = (each[index * share : (index + 1) * share] for each in batch)
    return ids, labels


def trained(engine: colossus.engine.Engine) -> list[float]:
    found = []
    for step in range(STEPS):
        result = engine.train_step(own(batch_of(step), engine))
        found += [result.loss, result.grad_norm]
    found.append(engine.eval_step(own(batch_of(99), engine)).loss)
    engine.close()
    return found


#: the first run by default
CASES: list[dict[str, Any]] = [
    dict(checkpoint="full", microbatches=2, per_host=2),
    dict(partitions=9, through_memory=False),
    dict(checkpoint="selective"),
    dict(ways={"*": "dense"}, per_host=2),
    dict(microbatches=2, per_host=2, through_memory=False),
    dict(ways={"*": "gather"}, through_memory=False),
    dict(type="hierarchical", per_host=2, ways=None),
]


def all_of(rank: int, cases: list[dict[str, Any]]) -> list[list[float]]:
    return [trained(engine_of(4, **case)) for case in cases]


def alone(rank: int) -> list[float]:
    return trained(engine_of(1))


@pytest.mark.parametrize("cases", ["first", *long("others")])
def test_owners_follow_one_process(cases: str) -> None:
    chosen = CASES[:4] if cases == "first" else CASES[4:]
    wanted = run_ranks(1, alone, with_context=False)[0]
    for found in run_ranks(4, all_of, chosen, with_context=False):
        for case, values in zip(chosen, found, strict=True):
            assert values == pytest.approx(wanted, rel=1e-12, abs=1e-12), case


@given(num_rows=st.integers(1, 300), num_owners=st.integers(1, 9), parts=st.none() | st.integers(1, 400))
def test_every_row_has_one_owner_and_one_place(num_rows: int, num_owners: int, parts: int | None) -> None:
    placement = Placement.of(num_rows, num_owners, parts)
    stored = [[row for span in placement.intervals(owner) for row in range(*span)] for owner in range(num_owners)]
    assert sorted(row for rows in stored for row in rows) == list(range(num_rows))
    for owner, rows in enumerate(stored):
        assert [(placement.owner_of(row), placement.place_of(row)) for row in rows] == [
            (owner, place) for place in range(len(rows))
        ]


# -- what leaves a rank, or a host ---------------------------------------------------------------------------

TABLE_ROWS, PER_OWNER, WIDTH = 40, 3, 6
W = TABLE_ROWS * WIDTH * 8


class OneTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = layers.Embedding(TABLE_ROWS, WIDTH, sparse=True)
        self.out = layers.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.table(ids).mean(1))


def uniform_ids(rank: int) -> list[int]:
    """As many rows of each of four owners, each twice; the two ranks of a host have one row of each in common."""
    first = [0, 2, 5, 7][rank]
    return [owner * 10 + first + i for owner in range(4) for i in range(PER_OWNER)] * 2


def counted(rank: int, strategy: dict[str, Any], checkpoint: str = "none") -> accounting.Counter:
    """Of a step whose two microbatches look up the same rows."""
    modules = dict(type=checkpoint, modules=["table"]) if checkpoint != "none" else "none"
    config = dict(
        parallel=dict(data=4, strategy=dict(type="hybrid", **strategy)),
        optimizer=dict(type="SGD", lr=0.5),
        schedule=dict(microbatches=2),
        train=dict(steps=1, global_batch_size=8, precision="fp64", activation_checkpoint=modules),
    )
    engine = colossus.initialize(config, model=OneTable, loss_fn=loss_fn)
    ids = torch.tensor(uniform_ids(rank)).view(2, -1)
    reduction, before_finish = engine.strategy._reduction, []
    finish = reduction.finish
    with accounting.count() as moved:
        reduction.finish = lambda: (before_finish.append(moved.bytes(operation="all_to_all rows")), finish())[1]
        engine.train_step((ids, torch.tensor([1, 3])))
    # gradients of rows are under way while those of the buckets are
    assert before_finish == [moved.bytes(operation="all_to_all rows")]
    engine.close()
    return moved


def counts_of_all(rank: int) -> list[accounting.Counter]:
    ways: list[dict[str, Any]] = [dict(ways={"*": way}) for way in ("owners", "gather", "dense")]
    found = [counted(rank, each) for each in (*ways, *(dict(each, per_host=2) for each in (ways[0], ways[2])))]
    again = counted(rank, ways[0], "full")
    assert {key: (tally.calls, tally.bytes) for key, tally in again.entries.items()} == {
        key: (tally.calls, tally.bytes) for key, tally in found[0].entries.items()
    }, "a recomputation exchanges something"
    return found


def test_what_is_sent_is_the_formula() -> None:
    n, hosts, alpha = 4, 2, 4 * PER_OWNER / TABLE_ROWS
    of_hosts = torch.zeros(2)
    for owners, gather, dense, *in_hosts in run_ranks(4, counts_of_all, with_context=False):
        assert owners.bytes("data", "all_to_all rows") == pytest.approx(2 * alpha * W * (n - 1) / n, rel=1e-12)
        assert gather.bytes("data", "all_gather rows") == pytest.approx(alpha * W * (n - 1), rel=1e-12)
        table = dense.bytes("data", "all_reduce") - owners.bytes("data", "all_reduce")
        assert table == pytest.approx(2 * W * (n - 1) / n, rel=1e-12)
        assert owners.bytes("data", "all_to_all ids") == 2 * 3 * PER_OWNER * 8
        for counter in in_hosts:  # but for the buckets, nothing of the table goes over all ranks
            assert counter.bytes("data") == owners.bytes("data", "all_reduce")
        operations = ("all_to_all rows", "all_reduce")
        of_hosts += torch.tensor([c.bytes(BETWEEN, o) for c, o in zip(in_hosts, operations, strict=True)])
    touched = len({*uniform_ids(0), *uniform_ids(1)})  # of a host, each row once
    assert touched == 4 * (2 * PER_OWNER - 1) == len({*uniform_ids(2), *uniform_ids(3)})
    of_host = touched / TABLE_ROWS
    assert (of_hosts / hosts).tolist() == pytest.approx(
        [2 * of_host * W * (hosts - 1) / hosts, 2 * W * (hosts - 1) / hosts], rel=1e-12
    )


# -- forwards without a step, and ranks that differ ----------------------------------------------------------


def parts_of(batch: tuple[Tensor, Tensor], rank: int) -> tuple[Tensor, Tensor]:
    """0, 1, 2, 4 samples on four ranks."""
    start, stop = [(0, 0), (0, 1), (1, 3), (3, 7)][rank]
    return batch[0][start:stop], batch[1][start:stop]


def evaluated(rank: int, per_host: int | None) -> dict[str, Any]:
    engine = engine_of(4, microbatches=2, **({} if per_host is None else dict(per_host=per_host)))
    found: dict[str, Any] = {}
    found["uneven"] = engine.eval_step(parts_of(batch_of(7), rank)).loss
    one = batch_of(8)[0][:1], batch_of(8)[1][:1]
    found["one sample"] = engine.eval_step(one if rank == 3 else (one[0][:0], one[1][:0])).loss
    engine.train_step(own(batch_of(0), engine))
    with torch.no_grad(), engine.strategy.evaluation():
        found["own loop"] = torch.stack([engine.model(batch_of(9)[0]) for _ in range(rank)]) if rank else None
    found["step"] = engine.train_step(own(batch_of(1), engine)).loss
    loader = [parts_of(batch_of(7), 3)] * (1 + (rank == 2))
    with pytest.raises(ValueError, match="batches"):
        engine._evaluation.all_batches(loader, None, lambda: 0.0)
    out = engine.model(batch_of(9)[0])  # with a gradient, outside of a step
    (engine.model(batch_of(5)[0]).sum() + out.sum()).backward()
    engine.close()
    return found


def evaluated_alone(rank: int) -> dict[str, Any]:
    engine = engine_of(1)
    found: dict[str, Any] = {}
    found["uneven"] = engine.eval_step((batch_of(7)[0][:7], batch_of(7)[1][:7])).loss
    found["one sample"] = engine.eval_step((batch_of(8)[0][:1], batch_of(8)[1][:1])).loss
    engine.train_step(batch_of(0))
    with torch.no_grad():
        found["own loop"] = engine.model(batch_of(9)[0])
    found["step"] = engine.train_step(batch_of(1)).loss
    return found


@pytest.mark.parametrize("per_host", [2, *long(None)])
@pytest.mark.rest("2")
def test_ranks_with_unequal_numbers_of_forwards(per_host: int | None) -> None:
    wanted = run_ranks(1, evaluated_alone, with_context=False)[0]
    for rank, found in enumerate(run_ranks(4, evaluated, per_host, with_context=False)):
        for name in ("uneven", "one sample", "step"):
            assert found[name] == pytest.approx(wanted[name], rel=1e-12), name
        if rank:
            torch.testing.assert_close(found["own loop"], wanted["own loop"].expand(rank, -1, -1), rtol=0, atol=1e-12)


def differing(rank: int) -> str:
    engine = engine_of(4)
    if rank == 1:
        engine.model.register_forward_pre_hook(lambda module, args: (module.block.table(args[0]), None)[1])
    with pytest.raises(RuntimeError) as caught:
        engine.train_step(own(batch_of(0), engine))
    engine.close()
    return str(caught.value)


def test_ranks_that_do_not_look_up_alike_end_in_words() -> None:
    for rank, said in enumerate(run_ranks(4, differing, with_context=False)):
        assert "is at the FETCH of 'block.plain.weight' while rank 1 is" in said, rank
