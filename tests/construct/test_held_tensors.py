"""What a constructor leaves behind besides parameters and buffers: tensors anywhere, hooks, copies from arrays."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any

import numpy as np
import torch
from helpers.ranks import grid, run_ranks
from torch import Tensor, distributions, nn

from colossus import layers
from colossus.construct.build_model import build
from colossus.context.parallel_context import ParallelContext

NamedPair = collections.namedtuple("NamedPair", "first second")


@dataclasses.dataclass(frozen=True)
class Frozen:
    held: Tensor
    more: list[Tensor]


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Tensor) -> None:
        self.held = held


class HoldsAnywhere(nn.Module):
    """Tensors of a constructor wherever Python can put them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("base", torch.arange(3.0))
        base, weight = self.base, self.linear.weight
        self.frozen = Frozen(base * 2, [base * 3])
        self.slotted = Slotted(base * 4)
        self.pair = NamedPair(base * 5, {"deep": (base * 6,)})
        self.default = collections.defaultdict(list, key=[base * 7])
        self.queue = collections.deque([base * 8])
        self.normal = distributions.Normal(base * 9, torch.ones(3))
        self.mixed = distributions.Independent(distributions.Normal(base * 10, torch.ones(3)), 1)
        self.closure = lambda: base * 11
        self.partial = functools.partial(torch.add, base, other=base * 11)
        self.largest = torch.max(torch.stack([base, base * 13]), dim=0)
        self.unregistered = [nn.Linear(3, 3)]
        self.chain = Frozen(base * 14, [])
        for _ in range(2000):
            self.chain.more.append(self.chain.held)
        node: Any = Slotted(base * 15)
        for _ in range(3000):
            node = [node]
        self.deep = node
        self.itself = [self]
        self.tied = Frozen(weight, [weight])
        self.register_forward_hook(lambda module, args, output: output + weight.sum() * 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_tensors_held_anywhere_have_their_values() -> None:
    model = build(HoldsAnywhere, ParallelContext(grid(), seed=3))
    while isinstance(model.deep, list):
        model.deep = model.deep[0]
    held = {
        1: model.partial.args[0], 2: model.frozen.held, 3: model.frozen.more[0], 4: model.slotted.held,
        5: model.pair.first, 6: model.pair.second["deep"][0], 7: model.default["key"][0], 8: model.queue[0],
        9: model.normal.loc, 10: model.mixed.base_dist.loc, 11: model.closure(), 12: model.partial(),
        13: model.largest.values, 14: model.chain.more[-1], 15: model.deep.held,
    }  # fmt: skip
    for factor, value in held.items():
        assert torch.equal(value, torch.arange(3.0) * factor), factor
    assert type(model.pair) is NamedPair
    assert model.tied.held is model.tied.more[0] is model.linear.weight
    assert model.normal.sample().shape == (3,)
    assert model.unregistered[0](torch.ones(3)).isfinite().all()
    assert model.unregistered[0].weight.requires_grad
    assert model(torch.ones(2, 3)).shape == (2, 3)


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain, self.ours = nn.Linear(3, 3), layers.Linear(3, 3)
        self.calls: list[str] = []
        weights = {"plain": self.plain.weight, "ours": self.ours.weight, "removed": self.plain.bias}
        for name, weight in weights.items():
            handle = weight.register_post_accumulate_grad_hook(lambda done, name=name: self._seen(name, done))
            if name == "removed":
                self.handle = handle

    def _seen(self, name: str, done: Tensor) -> None:
        assert done.grad is not None
        self.calls.append(name)

    def forward(self, x: Tensor) -> Tensor:
        return self.ours(self.plain(x))


def test_hooks_after_gradients_set_in_a_constructor_hold() -> None:
    """And a handle of the constructor removes its hook."""

    def body(context: ParallelContext) -> list[list[str]]:
        model = build(Hooked, context)
        model(torch.ones(2, 3)).sum().backward()
        calls, model.calls = sorted(model.calls), []
        model.handle.remove()
        model(torch.ones(2, 3)).sum().backward()
        return [calls, sorted(model.calls)]

    wanted = [["ours", "plain", "removed"], ["ours", "plain"]]
    assert body(ParallelContext(grid())) == wanted
    assert run_ranks(3, body) == [wanted] * 3


def test_an_array_that_is_refilled_has_the_values_of_each_copy() -> None:
    class Refilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
            array = np.zeros((3, 3), dtype=np.float32)
            shared = torch.from_numpy(array)
            with torch.no_grad():
                for value, linear in enumerate((self.first, self.second), start=1):
                    array[:] = value
                    linear.weight.copy_(shared)
                    linear.bias.copy_(shared[0])
                array[:] = 7
            self.register_buffer("sum", torch.zeros(3, 3) + torch.as_tensor(array))
            array[:] = 8
            self.last = shared

    model = build(Refilled, ParallelContext(grid()))
    values = [model.first.weight, model.first.bias, model.second.weight, model.second.bias, model.sum, model.last]
    for value, wanted in zip(values, (1, 1, 2, 2, 7, 8), strict=True):
        assert value.eq(wanted).all(), wanted
