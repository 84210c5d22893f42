"""A torch.Generator of one's own in a constructor gives the values of plain torch, whatever the plan and the order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from torch import Tensor, nn

import colossus

WIDTH = 3


class Chain(nn.Module):
    """Blocks whose weights are drawn from one generator, the last first."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        super().__init__()
        generator = generator or torch.Generator().manual_seed(11)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        for block in reversed(self.blocks):
            nn.init.normal_(block.weight, generator=generator)
            nn.init.uniform_(block.bias, generator=generator)

    def pipeline_blocks(self) -> list[nn.Module]:
        return list(self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _weights(rank: int, parallel: dict[str, Any], generator: torch.Generator | None) -> dict[str, Tensor]:
    config = dict(parallel=parallel, train=dict(global_batch_size=4), schedule=dict(microbatches=2), device="cpu")
    engine = colossus.initialize(
        config, model=lambda: Chain(generator), loss_fn=lambda out, batch: (out.square().sum(), len(out))
    )
    weights = {name: param.detach().clone() for name, param in engine.model.named_parameters() if not param.is_meta}
    engine.close()
    return weights


@pytest.mark.parametrize("is_outside", [False, True])
def test_stages_draw_what_one_process_draws(is_outside: bool) -> None:
    """A later stage must not repeat the first draws; a generator that was there before is left the same everywhere."""
    generator = torch.Generator().manual_seed(11) if is_outside else None
    plain = {name: param.detach() for name, param in Chain().named_parameters()}
    seen = set()
    for parallel in (dict(pipeline=2), dict(data=2)):
        for weights in run_ranks(2, _weights, parallel, generator, with_context=False):
            for name, value in weights.items():
                assert torch.equal(value, plain[name]), (parallel, name)
            seen |= weights.keys()
    assert seen == plain.keys()
