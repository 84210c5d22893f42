"""`torch.compile` of layers: one graph, of layers that nothing has run before, too, and for all blocks of a model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.every_layer import HEADS, HIDDEN, WIDE, hidden
from helpers.modes import MODES, own
from torch import Tensor, nn
from torch._dynamo.utils import counters

from colossus import layers
from colossus.construct.build_model import build
from colossus.context.parallel_context import ParallelContext
from colossus.layout.split_parameter import as_shards

pytestmark = pytest.mark.usefixtures("compiler")


def block() -> nn.Module:
    """With several outputs of one matmul, a column/row pair, rotary angles, and norms of features that are split."""
    return layers.TransformerBlock(HIDDEN, HEADS, None, WIDE, mlp="swiglu", rotary=True)


def blocks() -> nn.Module:
    return nn.Sequential(block(), block(), block())


def pair() -> nn.Module:
    return layers.MLP(HIDDEN, WIDE)


class FromSizes(nn.Module):
    """Between a pair, user code that computes with sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = layers.Linear(HIDDEN, WIDE, split="column"), layers.Linear(WIDE, HIDDEN, split="row")

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        batch, tokens, width = h.shape
        out: Tensor = self.down(h.sin() * width**-0.5 + h.size(-1) / h.numel() * batch / tokens)
        return out


def results_of(model: nn.Module, x: Tensor, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Its output, the gradient of x, and all others."""
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    y = layers.to_whole(call(leaf))
    y.sin().sum().backward()
    assert leaf.grad is not None
    with as_shards():
        results = [y.detach(), leaf.grad, *(each.grad.clone() for each in model.parameters() if each.grad is not None)]
        assert len(results) == 2 + len([*model.parameters()])
        assert all(one.abs().sum() > 0 for one in results)
    return results


def largest_gap(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True))


def first_compiled(
    context: ParallelContext, make: Callable[[], nn.Module], backend: str = "aot_eager"
) -> tuple[list[str], float]:
    """Groups that a compilation has made, and how far its results are from those of the same module uncompiled."""
    model = build(make, context, dtype=torch.float64)
    torch.manual_seed(0)
    x = own(context, hidden("cpu").double())
    known = set(map(str, context._groups.values()))
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    found = results_of(model, x, compiled)
    made = set(map(str, context._groups.values())) - known
    return sorted(made), largest_gap(found, results_of(model, x, model))


@pytest.mark.parametrize(
    ("mode", "make"),
    [("1d_sequence", pair), *(pytest.param(name, block, marks=pytest.mark.long) for name in MODES)],
)
@pytest.mark.rest("1d_sequence-pair")
def test_the_first_call_of_a_layer_compiles_into_one_graph(mode: str, make: Callable[[], nn.Module]) -> None:
    for made, gap in MODES[mode].run(first_compiled, make, timeout=180):
        assert made == []
        assert gap < 1e-12


@pytest.mark.rest("1d-aot_eager")
@pytest.mark.parametrize(
    ("mode", "backend"),
    [
        ("1d", "aot_eager"),
        *(pytest.param(mode, "aot_eager", marks=pytest.mark.long) for mode in MODES if mode != "1d"),
        pytest.param("1d", "inductor", marks=pytest.mark.long),
    ],
)
def test_a_graph_sees_the_sizes_of_the_whole(mode: str, backend: str) -> None:
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor wants a C++ compiler")
    for made, gap in MODES[mode].run(first_compiled, FromSizes, backend, timeout=400):
        assert made == []
        assert gap < 1e-12


def block_by_block(context: ParallelContext, backend: str) -> tuple[int, float]:
    """Graphs of three blocks that are compiled each by itself, and how far their results are from those before."""
    model: Any = build(blocks, context, dtype=torch.float64)
    torch.manual_seed(0)
    x = own(context, hidden("cpu").double())

    def between_blocks(x: Tensor) -> Tensor:
        out: Tensor = model(layers.to_residual(x))
        return out

    wanted = results_of(model, x, between_blocks)
    torch._dynamo.reset()
    counters.clear()
    for each in model:
        each.compile(backend=backend)
    gap = max(largest_gap(results_of(model, x, between_blocks), wanted) for _ in range(2))
    return counters["stats"]["unique_graphs"], gap


@pytest.mark.long
@pytest.mark.parametrize(("mode", "backend"), [("1d", "inductor"), *((mode, "aot_eager") for mode in MODES)])
def test_blocks_share_one_graph(mode: str, backend: str) -> None:
    """Also where what they take and return is split: a type of ours, which a compiler asks what it is."""
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor wants a C++ compiler")
    for graphs, gap in MODES[mode].run(block_by_block, backend, timeout=400):
        assert graphs == 1
        assert gap < 1e-12
