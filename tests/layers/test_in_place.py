"""Changing outputs of our layers in place, as plain torch allows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.long import long
from helpers.modes import BATCH, MODES, TOKENS, own
from helpers.ranks import run_ranks
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.checkpoint.state_dict import full_state_dict
from colossus.context.parallel_context import ParallelContext

HIDDEN = 12


class Add(nn.Module):
    """``out += x`` after lone linears, after an embedding of ids, after a gathered vocabulary and after a norm."""

    def __init__(self, here: Any) -> None:
        super().__init__()
        self.ids, self.first, self.norm = here.Embedding(7, HIDDEN), here.Linear(HIDDEN, HIDDEN), here.LayerNorm(HIDDEN)
        self.last = here.Linear(HIDDEN, 7)

    def forward(self, x: Tensor) -> Tensor:
        out = self.ids(torch.arange(x.shape[1]).expand(x.shape[:2]))
        out += x
        out = self.first(out)
        out += x
        out = self.norm(out)
        out *= 2.0
        out = self.last(out)
        out -= out.mean((1, 2), keepdim=True)
        return out


class Rectified(nn.Module):
    """``nn.ReLU(inplace=True)`` between a pair and behind it."""

    def __init__(self, here: Any, **split: str) -> None:
        super().__init__()
        column = dict.fromkeys(split, "column")
        self.net = nn.Sequential(
            here.Linear(HIDDEN, 24, **column),
            nn.ReLU(inplace=True),
            here.Linear(24, HIDDEN, **split),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class BetweenBlocks(nn.Module):
    """In place on activations that stay split between blocks, and on what is gathered from them."""

    def __init__(self, here: Any, ours: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.ours = here.Linear(HIDDEN, HIDDEN), here.Linear(HIDDEN, HIDDEN), ours

    def forward(self, x: Tensor) -> Tensor:
        out = layers.to_residual(x, self.first.parallel) if self.ours else x.clone()
        out = self.first(out)
        out += 1.0
        out = torch.relu_(self.last(out))
        out = layers.to_whole(out)
        out = self.last(out)
        out += x
        return out


CASES: list[tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = [
    (lambda: Add(layers), lambda: Add(nn)),
    (lambda: Rectified(layers, split="row"), lambda: Rectified(nn)),
    (lambda: Rectified(layers), lambda: Rectified(nn)),
    (lambda: BetweenBlocks(layers, ours=True), lambda: BetweenBlocks(nn)),
]


@pytest.mark.rest("1d_sequence", "2d")
@pytest.mark.parametrize("name", ["1d", "1d_sequence", "2d", "3d_2x1x2", *long("3d")])
def test_outputs_changed_in_place(name: str) -> None:
    x = torch.randn(BATCH, TOKENS, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def body(context: ParallelContext) -> list[tuple[dict[str, Tensor], Tensor, Tensor]]:
        results = []
        for ours, _ in CASES:
            model = colossus.build(ours, context, dtype=torch.float64)
            mine = own(context, x).clone().requires_grad_()
            out = model(mine)
            out.square().sum().backward()
            assert mine.grad is not None
            results.append((full_state_dict(model, context), out.detach(), mine.grad))
        return results

    ranks = MODES[name].run(body)
    for index, (_, plain) in enumerate(CASES):
        twin = plain().double()
        twin.load_state_dict(ranks[0][index][0])
        whole = x.clone().requires_grad_()
        expected = twin(whole)
        expected.square().sum().backward()
        assert whole.grad is not None
        for results in ranks:
            _, out, grad = results[index]
            # which samples a rank has is found by its output, equal to exactly those of the whole
            starts = [
                i for i in range(0, BATCH, len(out)) if torch.allclose(expected[i : i + len(out)], out, rtol=1e-9)
            ]
            assert len(starts) == 1
            torch.testing.assert_close(grad, whole.grad[starts[0] : starts[0] + len(out)], rtol=1e-9, atol=1e-11)


def squares(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return outputs.square().sum(), len(outputs)


def stages() -> nn.Module:
    """Plain linears, each followed by a function in place."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(inplace=True)) for _ in range(4)),
    )


def train(rank: int, parallel: dict[str, Any], schedule: dict[str, Any]) -> list[float]:
    config = dict(parallel=parallel, schedule=schedule, optimizer=dict(type="SGD", lr=0.05), device="cpu",
                  train=dict(global_batch_size=BATCH, precision="fp64", seed=5))  # fmt: skip
    engine = colossus.initialize(config, model=stages, loss_fn=squares)
    x = torch.randn(BATCH, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    results = [engine.train_step({"inputs": x}) for _ in range(3)]
    return [number for result in results for number in (result.loss, result.grad_norm)]


def test_functions_in_place_behind_plain_linears_of_a_split_backward() -> None:
    (expected,) = run_ranks(1, train, {}, {}, with_context=False)
    for kind in ("zb-h1", "1f1b"):
        schedule = dict(type=kind, microbatches=3)
        for found in run_ranks(2, train, dict(pipeline=2), schedule, with_context=False):
            assert found == pytest.approx(expected, rel=1e-10)
