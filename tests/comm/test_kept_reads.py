"""What a forward reads from its device is read once, however often the forward runs again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from torch import Tensor

from colossus.comm.kept_results import read_once
from colossus.context.parallel_context import ParallelContext
from colossus.layers.checkpointing import recompute


class Lengths:
    """A function whose result depends on numbers that it reads, each another one."""

    def __init__(self) -> None:
        self.num_reads = 0

    def _read(self) -> int:
        self.num_reads += 1
        return self.num_reads

    def __call__(self, x: Tensor) -> Tensor:
        first, second = read_once(self._read), read_once(self._read)
        return (x * first).sin() * second


def body(context: ParallelContext, kind: str, levels: int) -> tuple[int, Tensor]:
    """Return the reads of two calls under nested recomputation, and the gradient."""
    function, x = Lengths(), torch.arange(3.0, requires_grad=True)

    def nested(x: Tensor, level: int) -> Any:
        return recompute(lambda x: nested(x, level - 1), x, context=context, kind=kind) if level else function(x)

    (nested(x, levels) + nested(x, levels)).sum().backward()
    assert x.grad is not None
    return function.num_reads, x.grad


@pytest.mark.parametrize(("kind", "levels"), [("full", 1), ("full", 2), ("selective", 1)])
def test_a_recomputation_reads_nothing(kind: str, levels: int) -> None:
    ((reads, gradient),) = run_ranks(1, body, kind, levels)
    assert reads == 4  # two of each call
    x = torch.arange(3.0)
    assert torch.allclose(gradient, (x * 1).cos() * 1 * 2 + (x * 3).cos() * 3 * 4)
