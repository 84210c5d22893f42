"""Recomputation, and weight gradients left for later, on CUDA devices that do not exist."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.every_layer import HEADS, HIDDEN, WIDE, Adapted, hidden
from helpers.fake_cuda import Waits, run_fake_ranks
from helpers.fake_cuda.contexts import CUDA, as_input, fake_context
from helpers.long import but
from helpers.modes import MODES, Mode, own
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.context.parallel_context import ParallelContext
from colossus.layers.deferred_wgrad import DeferredWgrad
from colossus.layers.model_parallel import model_parallel_of

ALL = {"none": Mode("1d", (1,)), **MODES}
SOME = but(ALL.keys() - {"3d_2x1x2"}, ALL)


class Mixed(nn.Module):
    """A block of ours, and modules of torch's own whose activations wait with ours."""

    def __init__(self) -> None:
        super().__init__()
        self.block = layers.TransformerBlock(HIDDEN, HEADS, None, WIDE, dropout=0.1, mlp="swiglu", norm="rmsnorm")
        self.plain, self.dropout = nn.Linear(HIDDEN, HIDDEN), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.plain(layers.to_whole(self.block(x))))


def checkpointed(rank: int, mode: Mode, precision: str, kinds: list[str]) -> list[list[str]]:
    """For each kind what waits."""
    results = []
    with fake_context(rank, mode, precision, keep_gathered=True) as context:
        model = colossus.build(Mixed, context)
        x = as_input(own(context, hidden(CUDA)), context.precision)
        for kind in kinds:
            with Waits(allowed=True) as waits:
                for _ in range(2):
                    with context, context.precision.autocast(context.device):
                        y = layers.recompute(model, x, context=context, kind=kind)
                    y.float().sum().backward()
            assert x.grad is not None
            assert all(each.grad is not None and each.grad.is_cuda for each in model.parameters())
            results.append(waits.found)
    return results


@pytest.mark.parametrize("mode", SOME)
def test_checkpointed_blocks(mode: str) -> None:
    (results,) = run_fake_ranks(ALL[mode].world, checkpointed, ALL[mode], "bf16", ["full", "selective"])
    assert results == [[], []]


def deferred(rank: int, mode: Mode, precision: str) -> dict[str, Any]:
    """Of a dgrad alone, and of wgrad after it: what waits; how many gradients were left."""
    results: dict[str, Any] = {}
    with fake_context(rank, mode, precision, weight_scope="microbatch") as context:
        for name, make in (("block", Mixed), ("lora", Adapted)):
            model = colossus.build(make, context)
            x = as_input(own(context, hidden(CUDA)), context.precision)
            with Waits(allowed=True) as waits:
                left = _backward_in_two(model, x, context)
            trained = [each for each in model.parameters() if each.requires_grad]
            assert all(each.grad is not None and each.grad.is_cuda for each in trained)
            results[name] = waits.found, left
    return results


def _backward_in_two(model: nn.Module, x: Tensor, context: ParallelContext) -> int:
    weights = model_parallel_of(context).weights
    with context, DeferredWgrad(weights), context.precision.autocast(context.device):
        y = layers.to_whole(model(x))
    with weights.deferral.deferred() as tasks:
        y.float().sum().backward()
    assert x.grad is not None
    matrices = [each for each in model.parameters() if each.dim() == 2 and each.requires_grad]
    assert all(each.grad is None for each in matrices)
    weights.deferral.run(tasks)
    return len(tasks)


@pytest.mark.parametrize("mode", SOME)
def test_weight_gradients_left_for_later(mode: str) -> None:
    (results,) = run_fake_ranks(ALL[mode].world, deferred, ALL[mode], "bf16")
    assert results == {"block": ([], 5), "lora": ([], 6)}
