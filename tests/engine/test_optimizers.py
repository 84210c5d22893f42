"""The config's optimizers are torch's in everything but what they import."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from colossus.engine.optimizers import torch_optimizer


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("copied", [lambda optimizer: pickle.loads(pickle.dumps(optimizer)), copy.deepcopy])
def test_an_optimizer_can_be_copied(
    name: str, copied: Callable[[torch.optim.Optimizer], torch.optim.Optimizer]
) -> None:
    weight = nn.Parameter(torch.arange(3.0))
    optimizer = torch_optimizer(name, [weight], lr=0.1, weight_decay=0.5)
    weight.grad = torch.ones(3)
    optimizer.step()
    other = copied(optimizer)
    assert isinstance(other, getattr(torch.optim, name))
    (moved,) = other.param_groups[0]["params"]
    assert repr(other) == repr(optimizer)
    moved.grad = weight.grad
    optimizer.step()
    other.step()
    assert torch.equal(moved, weight)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_complex_parameters_are_trained(name: str) -> None:
    """torch's fused kernels, the default, refuse them."""
    ends = []
    makers: list[Any] = [partial(torch_optimizer, name), getattr(torch.optim, name)]
    for maker in makers:
        weight = nn.Parameter(torch.tensor([1.0 + 2.0j, -1.0j]))
        weight.grad = torch.tensor([0.5j, 1.0 + 1.0j])
        maker([weight], lr=0.1).step()
        ends.append(weight.detach())
    assert torch.equal(*ends)
