"""What a loss function may return, read and do: right as in one process, or refused in words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import colossus
from colossus.engine.loss_function import checked_sum

# -- what it returns ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (torch.ones(()), r"returned one tensor of shape \(\); it must return \(sum, count\)"),
        ((1.5, 3), r"returned \(a float, a int\); it must return"),
        ((np.float64(1.5), np.int64(3)), r"returned \(a numpy.float64, a numpy.int64\); it must return"),
        ((torch.ones(()), None), r"returned \(one tensor of shape \(\), a NoneType\); it must return"),
        ({"loss": torch.ones(())}, "returned a dict; it must return"),
        ((torch.ones(3), 3), r"a sum of shape \(3,\) .* they must be scalars"),
        ((torch.ones(()), float("nan")), "a count of nan; it must be the number"),
    ],
)
def test_what_is_no_sum_and_count_is_told(result: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        checked_sum(result)


@pytest.mark.parametrize("count", [3, 3.0, np.int64(3), np.float32(3), torch.tensor(3)])
def test_counts_are_numbers_of_any_kind(count: Any) -> None:
    total, number = checked_sum([torch.ones(()), count])
    assert (total, number) == (1, 3)


def test_a_loss_without_a_gradient_is_told() -> None:
    config = dict(optimizer=dict(type="SGD", lr=0.1), train=dict(global_batch_size=2), device="cpu")
    engine = colossus.initialize(
        config, model=lambda: nn.Linear(2, 2), loss_fn=lambda outputs, batch: (torch.zeros(()), 0)
    )
    with pytest.raises(ValueError, match=r"does not require a gradient.*outputs.sum\(\) \* 0.0, and a count of 0"):
        engine.train_step(torch.ones(2, 2))
    engine.close()
