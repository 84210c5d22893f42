"""`torch.compile` of layers that nothing has run before: what a layer works out at its first call is traced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.every_layer import HEADS, HIDDEN, WIDE, hidden
from helpers.modes import MODES, own
from torch import Tensor, nn

from colossus import layers
from colossus.construct.build_model import build
from colossus.context.parallel_context import ParallelContext


def block() -> nn.Module:
    """With several outputs of one matmul, a column/row pair, rotary angles, and norms of features that are split."""
    return layers.TransformerBlock(HIDDEN, HEADS, None, WIDE, mlp="swiglu", rotary=True)


def pair() -> nn.Module:
    return layers.MLP(HIDDEN, WIDE)


def first_compiled(context: ParallelContext, make: Callable[[], nn.Module]) -> tuple[list[str], list[float]]:
    """Groups that a compilation has made, and how far its results are from those of the same module uncompiled."""
    model = build(make, context, dtype=torch.float64)
    torch.manual_seed(0)
    x = own(context, hidden("cpu").double())
    known = set(map(str, context._groups.values()))
    results: list[list[Tensor]] = []
    for run in (torch.compile(model, backend="aot_eager", fullgraph=True), model):
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        y.sin().sum().backward()
        assert leaf.grad is not None
        grads = [each.grad.clone() for each in model.parameters() if each.grad is not None]
        results.append([y.detach(), leaf.grad, *grads])
    made = set(map(str, context._groups.values())) - known
    assert len(results[0]) == len(results[1]) == 2 + len([*model.parameters()])
    assert all(one.abs().sum() > 0 for one in results[1])
    return sorted(made), [(a - b).abs().max().item() for a, b in zip(*results, strict=True)]


@pytest.mark.parametrize(
    ("mode", "make"), [("2d", pair), *(pytest.param(name, block, marks=pytest.mark.long) for name in MODES)]
)
def test_the_first_call_of_a_layer_compiles_into_one_graph(mode: str, make: Callable[[], nn.Module]) -> None:
    for made, gaps in MODES[mode].run(first_compiled, make, timeout=180):
        assert made == []
        assert max(gaps) < 1e-12
