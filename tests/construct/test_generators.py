"""A torch.Generator of one's own in a constructor gives the values of plain torch, whatever the plan and the order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from torch import Tensor, nn

import colossus
from colossus.construct.build_model import build

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


class EveryDraw(nn.Module):
    """Ways of drawing, with the generator seeded again, by what is recorded, run at once, or there before."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.late = nn.Parameter(torch.empty(4))
        self.randn = nn.Parameter(torch.randn(3, generator=generator))
        self.rand = nn.Parameter(torch.rand(2, 2, generator=generator))
        self.order = torch.randperm(7, generator=generator)
        self.number = torch.rand((), generator=generator).item()
        self.integers = torch.randint(0, 90, (4,), generator=generator)
        self.choice = torch.multinomial(torch.ones(6), 3, generator=generator)
        self.normal = torch.normal(0.0, 1.0, (4,), generator=generator)
        generator.manual_seed(5)
        self.again = nn.Parameter(torch.randn(3, generator=generator))
        generator.manual_seed(5)
        self.once_more = nn.Parameter(torch.randn(3, generator=generator))
        self.existing = torch.zeros(3).numpy()
        torch.from_numpy(self.existing).normal_(generator=generator)
        self.masked = torch.empty(9).bernoulli_(0.5, generator=generator)
        nn.init.trunc_normal_(self.late, generator=generator)


def _tensors(module: nn.Module) -> dict[str, Any]:
    held = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
    return held | {name: param.detach().clone() for name, param in module.named_parameters()}


@pytest.mark.parametrize("factory", [Chain, EveryDraw])
def test_draws_are_those_of_plain_torch(factory: Callable[[], nn.Module]) -> None:
    built, plain = build(factory), factory()
    assert _tensors(built).keys() == _tensors(plain).keys()
    for name, value in _tensors(plain).items():
        assert torch.equal(_tensors(built)[name], value), name
    assert getattr(built, "number", None) == getattr(plain, "number", None)
    if isinstance(plain, EveryDraw):
        assert (built.existing == plain.existing).all()


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
