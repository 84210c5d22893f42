"""Element-by-element functions between a column and a row linear: all of them, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.ranks import RankError, run_ranks
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.context.parallel_context import ParallelContext
from colossus.state.model_state_dict import full_state_dict

IN, WIDE, OUT = 6, 12, 5

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "compare": lambda h: h * (h > 0.1) + h * (h <= -0.1) * 2 - (h == 0.0) * h + (h != h.abs()) * h,
    "torch.compare": lambda h: h * torch.gt(h, 0) + h.less_equal(0) * h,
    "where": lambda h: torch.where(h > 0, h, 0.1 * h),
    "where with numbers": lambda h: torch.where(h > 0, h, 0.5) + torch.where(h > 0, 2.0, h) + h.where(h < 1, 0.0),
    "constants": lambda h: torch.where(h > 0, torch.zeros_like(h), h) * torch.ones_like(h) + torch.full_like(h, 2.0),
    "maximum": lambda h: torch.maximum(h, -h) + torch.minimum(h, h.square()),
    "max of two": lambda h: torch.max(h, h * h) + h.min(h.sin()) + torch.max(h, other=-h),
    "log": lambda h: (h.abs() + 1).log() + torch.log1p(h.square()) + h.square().add(1.0).log2(),
    "sin": lambda h: h.sin() + h.cos() + h.tan().atan() + h.sinh() - h.cosh(),
    "2 ** x": lambda h: 2**h + 2 - (1 / (h * h + 1)) + (h * h + 1).reciprocal(),
    "operators": lambda h: abs(h) + (+h) - (-h) + h.detach() // 2 + h % 0.7 + h**2,
    "logical": lambda h: h * ((h > 0) & (h < 1)) + h * ~(h > 0.5) + h * ((h < -1) | (h > 1)) + h * ((h > 0) ^ (h > 1)),
    "clamp": lambda h: h.clamp(-0.5, 0.5) + h.clamp(min=h * 0.5) + torch.clip(h, max=0.3),
    "lerp": lambda h: torch.lerp(h, h.sin(), 0.3) + h.lerp(h.cos(), h.sigmoid()),
    "addcmul": lambda h: torch.addcmul(h, h, h, value=0.5) + torch.addcdiv(h, h, h.exp()) + torch.hypot(h, h + 3),
    "masked_fill": lambda h: h.masked_fill(h > 0.5, 0.0) + h.masked_fill(h < 0, torch.tensor(0.3, dtype=h.dtype)),
    "rounding": lambda h: h.round() + h.floor() * h + h.ceil() - h.trunc() * h + torch.sign(h) * h + torch.frac(h),
    "special": lambda h: torch.special.expit(h) + torch.special.log1p(h * h) + torch.erf(h) + torch.logaddexp(h, -h),
    "activations": lambda h: (
        F.softsign(h) + F.tanhshrink(h) + F.hardswish(h) + F.logsigmoid(h) + F.hardsigmoid(h) + F.softshrink(h)
        + F.threshold(h, 0.1, 0.2) + F.relu6(h) + F.mish(h) + F.silu(h) + F.gelu(h, approximate="tanh")
    ),
    "convert": lambda h: h.float().double() + h.detach() + h.clone().contiguous() + h.to(torch.float64),
    "frexp": lambda h: h * torch.frexp(h.detach()).mantissa,
    "kept finite": lambda h: h * torch.nan_to_num(h / h.relu()).detach().isfinite() + h * h.isnan().logical_not(),
}  # fmt: skip

IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp_": lambda h: h.clamp_(-0.5, 0.5),
    "several": lambda h: h.mul_(2.0).add_(1.0).sin_(),
    "operators": lambda h: _in_place(h),
    "masked_fill_": lambda h: h.masked_fill_(h.detach() > 0.5, 0.0),
    "relu": lambda h: F.relu(h, inplace=True),
    "unassigned": lambda h: (h.neg_(), h)[1],
    "zero_": lambda h: h.zero_(),
}


def _in_place(h: Tensor) -> Tensor:
    h += 1.0
    h *= 2.0
    h -= h.detach().cos()
    h /= 3.0
    h **= 2
    return h


class Pair(nn.Module):
    def __init__(self, linear: Any, **split: bool) -> None:
        super().__init__()
        self.up = linear(IN, WIDE, **({"split": "column"} if split else {}))
        self.down = linear(WIDE, OUT, **({"split": "row"} if split else {}))
        self.between: Callable[[Tensor], Tensor] = torch.tanh

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x)))


def gradients(model: Any, between: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, Tensor]:
    model.between = between
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = model(x)
    out.square().sum().backward()
    assert x.grad is not None
    return {"output": out.detach(), "dx": x.grad}


X = torch.randn(3, 7, IN, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("functions", [FUNCTIONS, IN_PLACE], ids=["new", "in place"])
def test_every_pointwise_function_is_torchs_own(functions: dict[str, Callable[[Tensor], Tensor]]) -> None:
    def body(context: ParallelContext) -> tuple[dict[str, Tensor], dict[str, Any]]:
        model = colossus.build(lambda: Pair(layers.Linear, split=True), context, dtype=torch.float64)
        results: dict[str, Any] = {}
        for name, function in functions.items():
            try:
                results[name] = gradients(model, function, X)
            except ValueError as error:
                results[name] = str(error)
                continue
            results[name] |= full_state_dict(model, context, gradients=True)
        return full_state_dict(model, context), results

    ranks = run_ranks(2, body)
    twin = Pair(nn.Linear).double()
    twin.load_state_dict(ranks[0][0])
    assert {name: value for _, results in ranks for name, value in results.items() if isinstance(value, str)} == {}
    for name, function in functions.items():
        want = gradients(twin, function, X)
        want |= {key: parameter.grad for key, parameter in twin.named_parameters() if parameter.grad is not None}
        for _, results in ranks:
            assert set(results[name]) == set(want)
            for key, value in want.items():
                torch.testing.assert_close(
                    results[name][key], value, rtol=1e-9, atol=1e-11, msg=lambda m, what=(name, key): f"{what}: {m}"
                )


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "where": lambda h: torch.where(h > 0),
    "max": lambda h: h.max(),
    "equal": lambda h: torch.equal(h, h),
    "bernoulli_": lambda h: h.detach().bernoulli_(0.5),
    "dropout": lambda h: F.dropout(h, 0.5),
    "rand_like": lambda h: torch.rand_like(h),
    "glu": lambda h: F.glu(h),
    "chunk": lambda h: h.chunk(2, -1),
    "view": lambda h: h.view(*h.shape[:2], 3, 4),
    "layer_norm": lambda h: F.layer_norm(h, (WIDE,)),
    "cat": lambda h: torch.cat((h, h), -1),
    "indexing": lambda h: h[torch.ones(h.shape[:2], dtype=torch.bool)],
    "assigning by index": lambda h: h.detach().__setitem__((..., 0), 0.0),
    "_is_all_true": lambda h: torch.distributions.Normal(h, 1.0, validate_args=True),
    "softmax": lambda h: h.softmax(-1),
    "cumsum": lambda h: h.cumsum(-1),
    "norm": lambda h: h.norm(),
    "normalize": lambda h: F.normalize(h, dim=-1),
    "__bool__": lambda h: bool(h > 0),
    "item": lambda h: h.item(),
    "mul": lambda h: torch.mul(h, torch.ones(WIDE // 2)),
    "clamp": lambda h: h.clamp(min=torch.zeros(WIDE // 2)),
    "conv1d": lambda h: F.conv1d(h, torch.ones(1, h.shape[1], 1)),
    "x.T": lambda h: h.T,
    "x.data": lambda h: h.data,
}


HINTS = {"chunk": "dict(gate=n, value=n)", "view": "split_heads", "layer_norm": "colossus.layers.LayerNorm"}


def test_what_mixes_elements_draws_or_meets_a_plain_tensor_stays_refused() -> None:
    def body(context: ParallelContext) -> dict[str, str]:
        model: Any = colossus.build(lambda: Pair(layers.Linear, split=True), context)
        messages = {}
        for name, function in REFUSED.items():
            try:
                function(model.up(X.float()))
                messages[name] = "nothing"
            except ValueError as error:
                messages[name] = str(error)
        return messages

    for messages in run_ranks(2, body):
        for name, message in messages.items():
            assert message.startswith(name), (name, message)
            assert "to_whole" in message, (name, message)
            assert HINTS.get(name, "") in message, (name, message)


def test_operands_that_are_split_differently_are_refused() -> None:
    def body(context: ParallelContext) -> None:
        up: Any = colossus.build(lambda: layers.Linear(4, 4, split="column"), context)
        x = torch.ones(2, 4, 4)
        torch.maximum(up(x), layers.to_residual(x, up.parallel))

    with pytest.raises(RankError, match=r"maximum combines a tensor that is split as .*: bring both to one layout"):
        run_ranks(2, body, sequence_sharded=True)
