"""Adapters beside frozen linears, alone and in pairs, with one output and several: the numbers of plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.compared import Case, compare_all, numbers, prepare
from helpers.modes import BATCH, MODES
from torch import Tensor, nn

from colossus import layers
from colossus.construct.initial_values import Normal
from colossus.layout.parameter import spec_of

TOKENS, HIDDEN, WIDE, RANK, ALPHA = 6, 12, 24, 12, 9.0


class PlainLoRA(nn.Module):
    def __init__(self, base: nn.Module, inputs: int, outputs: int | dict[str, int]) -> None:
        super().__init__()
        self.base, self.first = base.requires_grad_(False), nn.Linear(inputs, RANK, bias=False)
        self.second: nn.Module
        if isinstance(outputs, int):
            self.second = nn.Linear(RANK, outputs, bias=False)
        else:
            self.second = nn.ModuleDict({name: nn.Linear(RANK, size, bias=False) for name, size in outputs.items()})

    def forward(self, x: Tensor) -> Any:
        thin = self.first(x) * (ALPHA / RANK)
        if isinstance(self.second, nn.ModuleDict):
            return tuple(self.base[name](x) + self.second[name](thin) for name in self.second)
        return self.base(x) + self.second(thin)


def plain(inputs: int, outputs: int | dict[str, int], split: str | None = None) -> nn.Module:
    if isinstance(outputs, int):
        return PlainLoRA(nn.Linear(inputs, outputs), inputs, outputs)
    base = nn.ModuleDict({name: nn.Linear(inputs, size) for name, size in outputs.items()})
    return PlainLoRA(base, inputs, outputs)


def ours(inputs: int, outputs: int | dict[str, int], split: str | None = None) -> nn.Module:
    made = layers.LoRALinear(layers.Linear(inputs, outputs, split=split), RANK, ALPHA)
    if isinstance(made.second, layers.Linear):
        # else what `second` should add is not seen: it starts as zeros
        for shard in spec_of(made.second.weight).shards:
            object.__setattr__(shard, "init", Normal(0.5))
    else:
        nn.init.normal_(made.second.weight, generator=torch.Generator().manual_seed(5))
    return made


class Net(nn.Module):
    """A pair, a pair with two outputs, and a lone linear; ``outer``: on activations as they are between blocks."""

    def __init__(self, make: Any, outer: bool = False) -> None:
        super().__init__()
        self.up, self.down = make(HIDDEN, WIDE, "column"), make(WIDE, HIDDEN, "row")
        self.gate = make(HIDDEN, dict(gate=WIDE, value=WIDE), "column")
        self.out, self.lone = make(WIDE, HIDDEN, "row"), make(HIDDEN, HIDDEN)
        self.outer = outer

    def forward(self, x: Tensor) -> Tensor:
        if self.outer:
            x = layers.to_residual(x)
        x = x + self.down(F.gelu(self.up(x)))
        gate, value = self.gate(x)
        return self.lone(x + self.out(gate.sigmoid() * value))


LONG = ("2d", "2.5d_depth2", "3d", "3d_1x2x3")
CASES = [
    Case("adapters", lambda: Net(ours), lambda: Net(plain), (numbers(BATCH, TOKENS, HIDDEN),)),
    Case("between blocks", lambda: Net(ours, True), lambda: Net(plain), (numbers(BATCH, TOKENS, HIDDEN, seed=1),)),
]


@pytest.mark.rest("2d_2x3")
@pytest.mark.parametrize(
    "mode",
    ["1d", "1d_sequence", "2d_2x3", "3d_2x1x2", *(pytest.param(name, marks=pytest.mark.long) for name in LONG)],
)
def test_adapters_are_those_of_plain_torch(mode: str) -> None:
    prepare(CASES, [torch.float64])
    for found in MODES[mode].run(lambda context: compare_all(context, CASES, [torch.float64])):
        assert found == []


def test_training_starts_from_the_base() -> None:
    base = layers.Linear(HIDDEN, WIDE, split="column")
    adapted = layers.LoRALinear(base, RANK, ALPHA)
    x = torch.randn(3, HIDDEN)
    assert torch.equal(adapted(x), base(x))
    assert not any(param.requires_grad for param in base.parameters())
    adapted(x).sum().backward()
    assert adapted.second.weight.grad.abs().max() > 0
    assert adapted.first.weight.grad.abs().max() == 0


@pytest.mark.parametrize("base", [nn.Linear(4, 4), nn.Identity()])
def test_around_something_else_it_is_refused(base: Any) -> None:
    with pytest.raises(
        ValueError,
        match=rf"LoRALinear around a torch\.nn\.[a-z.]+\.{type(base).__name__}: it takes a colossus\.layers\.Linear",
    ):
        layers.LoRALinear(base, 2)
