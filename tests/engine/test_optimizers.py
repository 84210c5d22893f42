"""The config's optimizers are torch's in everything but what they import."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from colossus.engine.optimizers import adamw, sgd

MAKERS = [(adamw, torch.optim.AdamW), (sgd, torch.optim.SGD)]


def _save_and_load(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    loaded: torch.optim.Optimizer = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("make", MAKERS, ids=["AdamW", "SGD"])
@pytest.mark.parametrize(
    "copied", [lambda optimizer: pickle.loads(pickle.dumps(optimizer)), copy.deepcopy, _save_and_load]
)
def test_an_optimizer_can_be_copied(
    make: tuple[Callable[..., torch.optim.Optimizer], type[torch.optim.Optimizer]],
    copied: Callable[[torch.optim.Optimizer], torch.optim.Optimizer],
) -> None:
    ours, torchs = make
    weight = nn.Parameter(torch.arange(3.0))
    optimizer = ours([weight], lr=0.1, weight_decay=0.5)
    weight.grad = torch.ones(3)
    optimizer.step()
    other = copied(optimizer)
    assert isinstance(other, torchs)
    (moved,) = other.param_groups[0]["params"]
    assert torch.equal(moved, weight)
    assert repr(other) == repr(optimizer)
    moved.grad = weight.grad
    optimizer.step()
    other.step()
    assert torch.equal(moved, weight)


@pytest.mark.parametrize("make", MAKERS, ids=["AdamW", "SGD"])
def test_complex_parameters_are_trained(
    make: tuple[Callable[..., torch.optim.Optimizer], type[torch.optim.Optimizer]],
) -> None:
    """torch's fused kernels, the default, refuse them."""
    ends = []
    for maker in make:
        weight = nn.Parameter(torch.tensor([1.0 + 2.0j, -1.0j]))
        weight.grad = torch.tensor([0.5j, 1.0 + 1.0j])
        maker([weight], lr=0.1).step()
        ends.append(weight.detach())
    assert torch.equal(*ends)
