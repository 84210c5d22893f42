"""Weights that move together, one of them used twice before the other has its gradient."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from helpers.modes import MODES, own
from torch import Tensor, nn

from colossus import build, layers
from colossus.checkpoint.state_dict import full_state_dict
from colossus.context.parallel_context import ParallelContext
from colossus.layers.model_parallel import model_parallel_of


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = layers.Linear(12, 20, split="column")
        self.down = layers.Linear(20, 12, split="row")

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x)  # backward comes through both uses of `down` before it
        return self.down(F.gelu(inner)) + 0.5 * self.down(torch.tanh(inner)) + self.down(self.up(2 * x))


def _gradients(context: ParallelContext, coalesce: bool) -> dict[str, Tensor]:
    model = build(Twice, context, dtype=torch.float64)
    weights = model_parallel_of(context).weights
    if coalesce:
        weights.coalescing.coalesce(model.up.grouped_weight, model.down.grouped_weight)
        assert (
            weights.coalescing.group_of(model.up.weight) is weights.coalescing.group_of(model.down.weight) is not None
        )
    x = torch.randn(12, 6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights.begin_step()
    model(own(context, x)).square().sum().backward()
    weights.end_step()
    return full_state_dict(model, context, gradients=True)


def test_a_weight_that_is_used_several_times() -> None:
    plain = MODES["3d"].run(_gradients, False)
    together = MODES["3d"].run(_gradients, True, coalesce=True, weight_scope="microbatch")
    for mine, other in zip(together, plain, strict=True):
        for name, gradient in other.items():
            torch.testing.assert_close(mine[name], gradient, rtol=1e-12, atol=1e-12, msg=name)
