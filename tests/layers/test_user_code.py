"""Ordinary user code around our layers: the same numbers as plain torch in every mode, or a refusal in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.compared import Case, compare_all, numbers
from helpers.long import long
from helpers.modes import BATCH, MODES
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from colossus import layers

TOKENS, HIDDEN, WIDE, HEADS = 4, 12, 24, 12


class Plain:
    """What plain torch has for each."""

    Linear, LayerNorm = nn.Linear, nn.LayerNorm

    @staticmethod
    def pair(inputs: int, wide: int, bias: bool = True) -> tuple[nn.Module, nn.Module]:
        return nn.Linear(inputs, wide, bias), nn.Linear(wide, HIDDEN, bias)

    @staticmethod
    def split(x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:-1], heads, -1).transpose(-3, -2)

    @staticmethod
    def merge(x: Tensor) -> Tensor:
        return x.transpose(-3, -2).reshape(*x.shape[:-3], x.shape[-2], -1)


class Ours:
    Linear, LayerNorm = layers.Linear, layers.LayerNorm

    @staticmethod
    def pair(inputs: int, wide: int, bias: bool = True) -> tuple[nn.Module, nn.Module]:
        return layers.Linear(inputs, wide, bias, split="column"), layers.Linear(wide, HIDDEN, bias, split="row")

    split, merge = staticmethod(layers.split_heads), staticmethod(layers.merge_heads)


class Net(nn.Module):
    """A pair, a lone linear, a norm, and parameters that every rank has whole."""

    def __init__(self, here: Any, forward: Callable[[Any, Tensor], Tensor], inputs: int, bias: bool) -> None:
        super().__init__()
        self.here, self.does = here, forward
        self.up, self.down = here.pair(inputs, WIDE, bias)
        self.key, self.out = here.pair(HIDDEN, WIDE, bias)
        self.lone, self.norm = here.Linear(HIDDEN, HIDDEN, bias), here.LayerNorm(HIDDEN)
        self.gain, self.places = nn.Parameter(torch.linspace(-1, 1, HIDDEN)), nn.Parameter(torch.ones(TOKENS, HIDDEN))
        self.mixer = nn.Linear(TOKENS, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self, x)

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def in_place(net: Net, x: Tensor) -> Tensor:
    wide = net.up(x)
    wide += 1
    wide *= wide.sigmoid()
    out = net.down(wide)
    out += x
    out = net.lone(out.relu_())
    out += x
    out = net.norm(out)
    out *= 2
    out = layers.to_residual(out, net.lone.parallel) if net.here is Ours else out.clone()
    out += 1.0
    return layers.to_whole(out).sub_(x)


def scores_by_hand(net: Net, x: Tensor) -> Tensor:
    query, key = net.here.split(net.up(x), HEADS), net.here.split(net.key(x), HEADS)
    seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    low, high = F.normalize(query, dim=-1).chunk(2, -1)
    weights = (torch.cat((high, -low), -1) @ key.mT).masked_fill(~seen, float("-inf")).softmax(-1)
    return net.out(net.here.merge(weights @ key + key.mean(-2, keepdim=True)))


def recurrent(net: Net, x: Tensor) -> Tensor:
    state, states = torch.zeros_like(x[:, 0]), []
    for token in x.unbind(1):
        state = net.down(torch.tanh(net.up(torch.cat((token, state), -1))))
        states.append(state)
    return torch.stack(states, 1)


def chosen_rows(net: Net, x: Tensor) -> Tensor:
    seen = torch.tensor([True, False, True, True]).expand(x.shape[:2])
    out = x.clone()
    out[seen] = net.mlp(x[seen])
    return out


RIGHT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "in place": in_place,
    "scores by hand": scores_by_hand,
    "gated": lambda net, x: net.down(net.up(x) * torch.sigmoid(net.key(x))),
    "residual, broadcast": lambda net, x: (x + net.places) + net.gain * net.mlp(x + net.places),
    "two samples as one": lambda net, x: net.norm(net.mlp(x.reshape(-1, HIDDEN)).view_as(x)),
    "one token": lambda net, x: torch.stack([net.mlp(x[:, token]) for token in range(TOKENS)], 1),
    "heads as a dim": lambda net, x: net.lone(net.mlp(x.unflatten(1, (2, 2)))).flatten(1, 2),
    "no token": lambda net, x: torch.cat((net.mlp(x[:, :0]), net.mlp(x)), 1),
    "rows chosen by a mask": chosen_rows,
    "mixed tokens": lambda net, x: net.mlp(x + net.mixer(x.mT).mT),
    "not contiguous": lambda net, x: net.mlp(x.transpose(0, 1).contiguous().transpose(0, 1)).flip(1),
    "a checkpoint": lambda net, x: checkpoint(net.mlp, x, use_reentrant=True),
    "a checkpoint of what is split": lambda net, x: net.down(
        checkpoint(lambda wide: F.gelu(wide) * 2, net.up(x), use_reentrant=True)
    ),
    "a checkpoint from what is split": lambda net, x: checkpoint(
        lambda wide: net.down(F.gelu(wide)), net.up(x), use_reentrant=True
    ),
    "checkpoints in a row": lambda net, x: checkpoint_sequential(
        [net.up, nn.GELU(), net.down], 3, x, use_reentrant=True
    ),
}


def cases() -> list[Case]:
    x = numbers(BATCH, TOKENS, HIDDEN)
    found = [(name, forward, HIDDEN, name != "gated") for name, forward in RIGHT.items()]
    found.append(("recurrent", recurrent, 2 * HIDDEN, False))
    return [
        Case(
            name,
            lambda forward=forward, more=more: Net(Ours, forward, *more),
            lambda forward=forward, more=more: Net(Plain, forward, *more),
            (x,),
        )
        for name, forward, *more in found
    ]


@pytest.mark.rest("1d")
@pytest.mark.parametrize(
    "mode",
    ["1d", "3d_2x1x2", *long("1d_sequence", "2d", "2.5d_depth2", "3d")],
)
def test_the_same_numbers_as_plain_torch(mode: str) -> None:
    for found in MODES[mode].run(lambda context: compare_all(context, cases(), [torch.float64])):
        assert found == []
