"""Who owns which tensor, what travels to owners and back, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import two_tables
from helpers.long import long
from helpers.ranks import run_ranks
from helpers.training import SIZES, batch_of, config_of, run_plan
from helpers.whole_optimizers import OPTIMIZERS
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import colossus
from colossus.comm import accounting
from colossus.context.groups import AxisGroup
from colossus.optim.muon import orthogonalise
from colossus.optim.owner_exchange import choose_owners, in_buckets
from colossus.state.model_state_dict import full_state_dict

MODEL = dict(type="GPT", **{**SIZES, "num_layers": 1})


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=40), st.integers(1, 9))
def test_no_owner_has_more_than_its_share_and_one_tensor(costs: list[float], ranks: int) -> None:
    owners, given_ = choose_owners(costs, ranks), [0.0] * ranks
    for owner, cost in zip(owners, costs, strict=True):
        given_[owner] += cost
    assert len(owners) == len(costs)
    assert max(given_) <= sum(costs) / ranks + max(costs) * (1 - 1 / ranks) + 1e-9


@pytest.mark.parametrize("limit", [1, 11, 12, 24, 100])
def test_owners_work_at_the_same_time(limit: int) -> None:
    """Also where a tensor alone is more than an exchange is to have for one of them."""
    whole = ((0, 3), (0, 4))
    tensors: list[Any] = [SimpleNamespace(shape=(3, 4), numel=12, boxes=[whole] * 3, own=whole) for _ in range(7)]
    holders: Any = SimpleNamespace(group=AxisGroup(("data",), (0, 1, 2), 0, None), same_copy=lambda *_: range(3))
    buckets = in_buckets(tensors, [12.0] * 7, holders, limit)
    assert [len(numbers) for numbers, _ in buckets] == {24: [6, 1], 100: [7]}.get(limit, [3, 3, 1])
    assert sorted(k for numbers, _ in buckets for k in numbers) == list(range(7))
    owned = [len(exchange.owned) for _, exchange in buckets]
    assert owned == {24: [2, 1], 100: [3]}.get(limit, [1, 1, 1])


def count(rank: int, plan: dict[str, Any], name: str) -> tuple[float, float, float, float, list[int]]:
    """Body of a rank: bytes that it sent to owners and from them in a step, by the count and by the formula; the
    elements of what it owns."""
    optimizer = OPTIMIZERS[name][0]
    engine = colossus.initialize(
        config_of(plan, 2, "fp64", optimizer=optimizer) | dict(model=MODEL, optimizer=optimizer)
    )
    part = 8 // engine.context.size("data")
    with accounting.count() as counter:
        engine.train_step({key: value[:part] for key, value in batch_of(0).items()})
    own: Any = engine.optimizer
    counted = [counter.bytes(operation=f"all_to_all {way}") for way in ("to owners", "from owners")]
    exchanges, size, times = (own.exchanges, 2, 1) if name == "Muon" else ([own.exchange], 8, 2)
    formula = [sum(exchange.bytes_sent(size)[way] for exchange in exchanges) * times ** (1 - way) for way in (0, 1)]
    owned = [exchange.tensors[k].numel for exchange in exchanges for k in exchange.owned]
    engine.close()
    return *counted, *formula, owned


@pytest.mark.rest("plan1-0.5-0.5")
@pytest.mark.parametrize(("plan", "to_owners", "back"), [
    (dict(data=2), 0, 1), (dict(tensor=2), 1 / 2, 1 / 2), (dict(data=2, zero=3), 1 / 2, 1 / 2),
])  # fmt: skip
def test_bytes_to_owners_and_back_are_those_of_the_formula(plan: dict[str, Any], to_owners: float, back: float) -> None:
    for name in ("Muon", "Shampoo"):
        results = run_ranks(2, count, plan, name, with_context=False)
        for of_rank in results:
            assert of_rank[:2] == of_rank[2:4]
        if name == "Muon":  # in bf16; of each element one rank has it, the other sends it or gets it
            total = sum(sum(owned) for *_, owned in results)
            assert total == 4 * 24**2 + 2 * 24 * 96
            assert sum(counts[0] for counts in results) == pytest.approx(2 * total * to_owners, rel=0.02)
            assert sum(counts[1] for counts in results) == pytest.approx(2 * total * back, rel=0.02)


def test_a_matrix_becomes_orthogonal() -> None:
    x = torch.randn(12, 31, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    singular = torch.linalg.svdvals(orthogonalise(x, (3.4445, -4.775, 2.0315), 5, 1e-7))
    assert singular.min() > 0.6
    assert singular.max() < 1.3
    wide, tall = (orthogonalise(matrix, (1.5, -0.5, 0.0), 40, 1e-7) for matrix in (x, x.T))
    assert torch.allclose(wide @ tall, torch.eye(12, dtype=torch.float64))


@pytest.mark.parametrize("strategy", ["local_sgd", *long("sgp")])
def test_replicas_of_their_own_have_owners_inside_of_each(strategy: str) -> None:
    """With its parameters whole or cut over two ranks of its own each replica is the same."""
    optimizer = OPTIMIZERS["Adafactor"][0]
    configs = [
        config_of(dict(data=2, strategy=strategy, **plan), 3, "fp64") | dict(model=MODEL, optimizer=optimizer)
        for plan in ({}, dict(tensor=2))
    ]
    whole, cut = run_plan(2, configs[0], 3), run_plan(4, configs[1], 3)
    for replica in range(2):
        for name, value in whole[replica].end.items():
            assert torch.allclose(cut[2 * replica].end[name], value, rtol=0, atol=1e-9), name


def test_masters_of_low_precision_parameters_are_updated_whole() -> None:
    for name in ("Muon", "Adafactor", "LAMB"):
        config = config_of({}, 4, "fp64", lr_schedule=dict(warmup_steps=0))
        config |= dict(model=MODEL, optimizer=OPTIMIZERS[name][0])
        config["train"]["precision"] = dict(params="bf16")
        (alone,) = run_plan(1, config, 4)
        for trace in run_plan(2, config | dict(parallel=dict(data=2, zero=1)), 4):
            assert trace.losses == pytest.approx(alone.losses, rel=2**-8), name
        moved = max((alone.end[key] - value).abs().max().item() for key, value in alone.start.items())
        assert moved > 1e-3, name


def with_tables(rank: int, *sections: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Body of a rank: the weights behind three steps of a model with tables, for each optimizer."""
    states = []
    for section in sections:
        parallel = dict(data=2, strategy="hybrid")
        config = dict(parallel=parallel, train=dict(global_batch_size=8, precision="fp64"), device="cpu")
        engine = colossus.initialize(
            config | dict(optimizer=section), model=two_tables.Words, loss_fn=two_tables.loss_fn
        )
        for step in range(3):
            engine.train_step(two_tables.batch_of(step, 8, rank, 2))
        states.append(full_state_dict(engine.model, engine.context))
        engine.close()
    return states


def test_tables_have_rules_of_their_own_beside_whole_parameters() -> None:
    """With rules for groups, and without: they are not sent to owners, and updated as beside any optimizer."""
    tables = dict(lr=0.1, tables=dict(type="SGD", lr=0.2))
    groups = dict(groups=[dict(match="out.*", lr_scale=0.5)])
    whole, ruled = dict(type="torch.optim:SGD", whole=True), dict(type="torch.optim:SGD", whole=True, **groups)
    sections = (whole, ruled, dict(type="SGD"), dict(type="SGD", **groups))
    for *mine, wanted, wanted_of_ruled in run_ranks(
        2, with_tables, *({**section, **tables} for section in sections), with_context=False
    ):
        for state, other in zip(mine, (wanted, wanted_of_ruled), strict=True):
            for name, value in other.items():
                torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12, msg=name)


def test_what_is_wrong_is_told() -> None:
    def error_of(optimizer: dict[str, Any]) -> str:
        with pytest.raises(ValueError, match="must be") as caught:
            colossus.initialize(dict(model=MODEL, optimizer=optimizer, device="cpu"))
        return str(caught.value)

    def body(rank: int) -> list[str]:
        return [
            error_of(dict(type="Muon", dtype="int8")),
            error_of(dict(type="LAMB", betas=(0.9, 1.0))),
            error_of(dict(type="Adafactor", d=0.5)),
            error_of(dict(type="LARS", momentum=-1.0)),
        ]

    (messages,) = run_ranks(1, body, with_context=False)
    for message, wanted in zip(
        messages, ("dtype", "betas.1: must be less than 1", "d: must be at least 1", "momentum: must be"), strict=True
    ):
        assert wanted in message
