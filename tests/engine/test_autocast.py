"""torch.autocast, around a step or inside of a ``forward``: every plan does with it what one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.modes import BATCH, MODES, own
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.context.parallel_context import ParallelContext
from colossus.gradients.gradient_axes import gradient_sum_axes
from colossus.state.model_state_dict import full_state_dict, load_full_state_dict

HIDDEN, WIDE = 12, 24


class Mixed(nn.Module):
    """Linears alone and in a pair, and one that is left out of autocast."""

    def __init__(self, here: Any, column: dict[str, str], row: dict[str, str]) -> None:
        super().__init__()
        self.first = here.Linear(HIDDEN, HIDDEN)
        self.up, self.down = here.Linear(HIDDEN, WIDE, **column), here.Linear(WIDE, HIDDEN, **row)
        self.exact = here.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.down(torch.relu(self.up(self.first(x))))
            with torch.autocast("cpu", enabled=False):
                return self.exact(x.to(self.exact.weight.dtype)), x


def small_numbers(like: Tensor, seed: int) -> Tensor:
    """-1, 0 and 1, mostly 0: bfloat16 has all their products and sums, whoever adds them in whatever order."""
    return torch.randint(-3, 4, like.shape, generator=torch.Generator().manual_seed(seed)).div(3, rounding_mode="trunc")


def exact_twin(dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    twin = Mixed(nn, {}, {}).to(dtype)
    twin.load_state_dict({name: small_numbers(value, i) for i, (name, value) in enumerate(twin.state_dict().items())})
    x = small_numbers(torch.empty(BATCH, 2, HIDDEN), 100).to(dtype).requires_grad_()
    out, _ = twin(x)
    (out * small_numbers(out, 101)).sum().backward()
    return twin, x, out


@pytest.mark.rest("1d", "2.5d_depth2", "2d", "3d")
@pytest.mark.parametrize("mode", ["1d", "1d_sequence", "2d", "2.5d_depth2", "3d"])
def test_products_are_taken_in_bfloat16_and_gradients_are_not(mode: str) -> None:
    twin, whole, expected = exact_twin(torch.float32)
    for mine, wide in zip(twin.parameters(), exact_twin(torch.float64)[0].parameters(), strict=True):
        assert torch.equal(mine.grad.double(), wide.grad), "the numbers of this test are too large for bfloat16"

    def body(context: ParallelContext) -> list[str]:
        problems = []
        model: Any = colossus.build(lambda: Mixed(layers, {"split": "column"}, {"split": "row"}), context)
        load_full_state_dict(model, twin.state_dict(), context)
        x = own(context, whole.detach()).clone().requires_grad_()
        out, narrow = model(x)
        problems += [] if (out.dtype, narrow.dtype) == (torch.float32, torch.bfloat16) else [f"dtypes {out}, {narrow}"]
        (out * own(context, small_numbers(expected, 101))).sum().backward()
        for parameter in model.parameters():
            if parameter.grad.dtype != parameter.dtype:
                problems.append(f"a gradient of {parameter.grad.dtype}")
            axes = gradient_sum_axes(parameter, context)
            if axes:
                torch.distributed.all_reduce(parameter.grad, group=context.group(axes).process_group)
        compared = {"output": (out, own(context, expected)), "input": (x.grad, own(context, whole.grad))}
        grads = full_state_dict(model, context, gradients=True)
        compared |= {name: (grads[name], parameter.grad) for name, parameter in twin.named_parameters()}
        return problems + [name for name, (mine, want) in compared.items() if not torch.equal(mine, want)]

    for problems in MODES[mode].run(body):
        assert problems == []
