"""Latent attention as plain torch writes it: output and every gradient under every tensor mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import layer_cases
from helpers.latent_twin import PlainLatentAttention
from helpers.layer_cases import LayerCase, Parameters, numbers
from helpers.long import but
from helpers.modes import BATCH, MODES
from torch import Tensor, nn

from colossus import layers
from colossus.context.parallel_context import ParallelContext
from colossus.layers.block_options import LatentOptions

HIDDEN, HEADS, TOKENS = 24, 12, 6
#: with and without a low rank of the queries, and biases
SIZES: dict[str, dict[str, Any]] = {
    "low queries": dict(kv_rank=12, q_rank=18, nope_dim=3, rope_dim=6, value_dim=5),
    "plain queries, biases": dict(kv_rank=6, nope_dim=1, rope_dim=6, value_dim=7, bias=True),
}


class Between(nn.Module):
    """The layer where activations are split as between blocks."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner = layers.LatentAttention(HIDDEN, HEADS, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(layers.to_residual(x))


def case(bias: bool = False, **sizes: int) -> LayerCase:
    twin = PlainLatentAttention(HIDDEN, HEADS, LatentOptions(**sizes), bias).double()

    def plain(parameters: Parameters, x: Tensor) -> Tensor:
        own = {name.removeprefix("inner."): value for name, value in parameters.items()}
        return torch.func.functional_call(twin, own, (x,), strict=True)

    return LayerCase(lambda: Between(bias=bias, **sizes), (numbers(BATCH, TOKENS, HIDDEN),), plain)


def gaps(context: ParallelContext) -> dict[str, tuple[float, str]]:
    found = {}
    for name, sizes in SIZES.items():
        result, parameters = layer_cases.compute(context, case(**sizes), torch.float64)
        expected = layer_cases.compute_plain(context.device, case(**sizes), parameters)
        found[name] = layer_cases.largest_gap(context, result, expected)
    return found


@pytest.mark.parametrize("name", but(MODES.keys() - {"1d_sequence", "3d_2x1x2"}, MODES))
def test_every_mode_is_plain_torch(name: str) -> None:
    for found in MODES[name].run(gaps):
        assert all(gap < 1e-12 for gap, _ in found.values()), found


def test_sizes_that_ranks_do_not_split_are_refused() -> None:
    def body(context: ParallelContext) -> None:
        with context, pytest.raises(ValueError, match=r"kv_rank = 7 does not divide over the 2 ranks of col; 6 or 8"):
            layers.LatentAttention(HIDDEN, HEADS, kv_rank=7)

    MODES["2d"].run(body)
