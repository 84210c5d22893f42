"""Rules on rows, against torch's optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from colossus.rows.row_gradient import RowGradient
from colossus.rows.row_rules import RULES, Features, rule_of

ROWS, DIM, STEPS = 7, 3, 5


def table() -> Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def gradients(whole: bool, dtype: torch.dtype = torch.float64) -> list[RowGradient]:
    """Of some rows a step, none in one of them; or of all."""
    generator = torch.Generator().manual_seed(2)
    ids = [[0, 3], [3, 4, 6], [], [0, 1, 3], [3]]
    some = [torch.arange(ROWS) if whole else torch.tensor(each, dtype=torch.int64) for each in ids]
    return [RowGradient(each, torch.randn(len(each), DIM, generator=generator, dtype=dtype)) for each in some]


def by_rule(name: str, options: dict[str, Any], steps: list[RowGradient], whole: bool) -> tuple[Tensor, dict[str, Any]]:
    x = table()
    rule = rule_of(name)
    state = rule.state(x, options)
    for step in steps:
        rule.update(x, state, None if whole else step.ids, step.rows, options)
    return x, state


DENSE = {
    "sgd": ("sgd", torch.optim.SGD, dict(lr=0.1, weight_decay=0.1, maximize=True), {}),
    "momentum": (
        "momentum",
        torch.optim.SGD,
        dict(lr=0.1, momentum=0.7, dampening=0.2, weight_decay=0.1, maximize=True),
        {},
    ),
    "nesterov": ("momentum", torch.optim.SGD, dict(lr=0.1, momentum=0.7, nesterov=True), {}),
    "adagrad": (
        "adagrad",
        torch.optim.Adagrad,
        dict(lr=0.1, lr_decay=0.3, initial_accumulator_value=0.2, eps=1e-3, weight_decay=0.1),
        {},
    ),
    "adam": ("adam", torch.optim.Adam, dict(lr=0.1, betas=(0.8, 0.9), eps=1e-2, weight_decay=0.1, maximize=True), {}),
    "adamw": (
        "adam",
        torch.optim.AdamW,
        dict(lr=0.1, betas=(0.8, 0.9), eps=1e-2, weight_decay=0.1),
        dict(decoupled_weight_decay=True),
    ),
}


@pytest.mark.parametrize("case", DENSE)
def test_a_rule_on_all_rows_is_torchs_dense_optimizer(case: str) -> None:
    name, kind, options, more = DENSE[case]
    param = nn.Parameter(table())
    optimizer = kind([param], **options)
    steps = gradients(whole=True)
    for step in steps:
        param.grad = step.rows.clone()
        optimizer.step()
    found, state = by_rule(name, options | more, steps, whole=True)
    torch.testing.assert_close(found, param.detach(), rtol=1e-13, atol=1e-13)
    for key, value in optimizer.state[param].items():
        if value is not None:
            torch.testing.assert_close(torch.as_tensor(state[key]), torch.as_tensor(value), rtol=1e-13, atol=1e-13)


SPARSE = {
    "sgd": ("sgd", torch.optim.SGD, dict(lr=0.1, maximize=True)),
    "adagrad": ("adagrad", torch.optim.Adagrad, dict(lr=0.1, lr_decay=0.3, initial_accumulator_value=0.2, eps=1e-3)),
    "adam": ("adam", torch.optim.SparseAdam, dict(lr=0.1, betas=(0.8, 0.9), eps=1e-2, maximize=True)),
}


@pytest.mark.parametrize("case", SPARSE)
def test_a_rule_on_rows_is_torchs_optimizer_on_sparse_gradients(case: str) -> None:
    name, kind, options = SPARSE[case]
    param = nn.Parameter(table())
    optimizer = kind([param], **options)
    steps = gradients(whole=False)
    for step in steps:
        param.grad = step.as_sparse(ROWS)
        optimizer.step()
    found, state = by_rule(name, options, steps, whole=False)
    torch.testing.assert_close(found, param.detach(), rtol=1e-13, atol=1e-13)
    for key, value in optimizer.state[param].items():
        if value is not None:
            torch.testing.assert_close(
                torch.as_tensor(state[key]).double(), torch.as_tensor(value).double(), rtol=1e-13, atol=1e-13
            )


@pytest.mark.parametrize("options", [dict(lr=0.1, momentum=0.7), dict(lr=0.1, momentum=0.7, nesterov=True)], ids=str)
def test_lazy_momentum_is_an_optimizer_for_each_row(options: dict[str, Any]) -> None:
    """torch's own, given each row as a parameter that has a gradient only in the steps that touch it."""
    rows = [nn.Parameter(row.clone()) for row in table()]
    optimizer = torch.optim.SGD(rows, **options)
    steps = gradients(whole=False)
    for step in steps:
        optimizer.zero_grad()
        for index, grad in zip(step.ids.tolist(), step.rows, strict=True):
            rows[index].grad = grad.clone()
        optimizer.step()
    found, _ = by_rule("momentum", options, steps, whole=False)
    torch.testing.assert_close(found, torch.stack([row.detach() for row in rows]), rtol=1e-13, atol=1e-13)


def test_row_wise_adagrad_has_one_accumulator_a_row() -> None:
    expected, sums = table(), torch.full((ROWS, 1), 0.3, dtype=torch.float64)
    steps = gradients(whole=False)
    for step in steps:
        for index, grad in zip(step.ids.tolist(), step.rows, strict=True):
            sums[index] += sum(float(g) ** 2 for g in grad) / DIM
            expected[index] -= 0.1 * grad / (sums[index].sqrt() + 1e-3)
    options = dict(lr=0.1, eps=1e-3, initial_accumulator_value=0.3)
    found, state = by_rule("rowwise_adagrad", options, steps, whole=False)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(state["sum"], sums, rtol=1e-13, atol=1e-13)


def test_row_wise_adagrad_on_a_part_of_the_features_takes_the_squares_of_all() -> None:
    steps = gradients(whole=False)
    options = dict(lr=0.1, eps=1e-3)
    expected, _ = by_rule("rowwise_adagrad", options, steps, whole=False)
    rule, parts = rule_of("rowwise_adagrad"), [table()[:, :2].clone(), table()[:, 2:].clone()]
    states: list[dict[str, Any]] = [{}, {}]
    for step in steps:
        pieces = [step.rows[:, :2], step.rows[:, 2:]]
        for index, other in ((0, 1), (1, 0)):
            features = Features(DIM, lambda own, other=other: own + pieces[other].square().sum(1))
            rule.update(parts[index], states[index], step.ids, pieces[index], options, features)
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-13, atol=1e-13)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(RULES)), st.sets(st.integers(0, ROWS - 1)))
def test_rows_that_are_not_touched_do_not_change(name: str, touched: set[int]) -> None:
    x, options = table(), dict(lr=0.1)
    rule = rule_of(name)
    state: dict[str, Any] = {}
    rule.update(x, state, torch.arange(ROWS), torch.ones(ROWS, DIM, dtype=x.dtype), options)
    before, state_before = x.clone(), {key: value.clone() for key, value in state.items()}
    ids = torch.tensor(sorted(touched), dtype=torch.int64)
    rule.update(x, state, ids, torch.ones(len(ids), DIM, dtype=x.dtype), options)
    others = torch.tensor([index for index in range(ROWS) if index not in touched], dtype=torch.int64)
    assert torch.equal(x[others], before[others])
    assert not len(ids) or bool((x[ids] != before[ids]).all())
    for key, value in state.items():
        assert key == "step" or torch.equal(value[others], state_before[key][others])


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [("sgd", dict(weight_decay=0.1), "takes no weight decay"), ("adam", dict(amsgrad=True), "amsgrad")],
)
def test_what_needs_all_rows_is_refused(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rule_of(name).update(table(), {}, torch.tensor([1]), torch.zeros(1, DIM), dict(lr=0.1, **options))
