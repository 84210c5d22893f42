"""What may stand between two linears that nobody has named: it works on parts, or the linears are no pair."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.found_pairs import pairs_of
from helpers.long import long
from helpers.user_models.cases import BATCH, CLASSES, TOKENS, WIDTH, Batch, classify, draw, vectors
from helpers.user_models.table import Run, fill, twins
from helpers.user_models.unchanged import unchanged
from torch import Tensor, nn

HIDDEN = 16


class Pair(nn.Module):
    """A head of x + down(between(up(x)))."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, CLASSES)

    def between(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.down(self.between(self.up(x))))


# -- autograd functions and hooks -------------------------------------------------------------------------------


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = x.sigmoid()
        return grad * (gate + x * gate * (1 - gate))


class Tanh(torch.autograd.Function):
    """Saves its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.tanh()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return grad * (1 - out * out)


class Both(torch.autograd.Function):
    """Product and sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx: Any, of_product: Tensor, of_sum: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return of_product * y + of_sum, of_product * x + of_sum


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round(decimals=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class MeanGradient(torch.autograd.Function):
    """A sample's gradients are as large as their mean: each needs the parts of all ranks, and nothing is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return mean_size(grad)


class Snake(torch.autograd.Function):
    """With a parameter per feature."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: Tensor) -> Tensor:
        ctx.save_for_backward(x, alpha)
        return x + (alpha * x).sin().square() / alpha

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, alpha = ctx.saved_tensors
        sine = (2 * alpha * x).sin()
        of_alpha = sine * x / alpha - (alpha * x).sin().square() / alpha.square()
        return grad * (1 + sine), (grad * of_alpha).flatten(0, -2).sum(0)


def mean_size(grad: Tensor) -> Tensor:
    return grad.sign() * grad.abs().mean((1, 2), keepdim=True)


def hooked(h: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    h = h * 2
    if h.requires_grad:  # not in evaluation
        h.register_hook(hook)
    return h


#: what is between -> whether the linears around it are a pair
FUNCTIONS: dict[str, tuple[Callable[[Any, Tensor], Tensor], bool]] = {
    "swish": (lambda _, h: Swish.apply(h), True),
    "swish of tanh": (lambda _, h: Swish.apply(Tanh.apply(h)).tanh(), True),
    "two results": (lambda _, h: sum(Both.apply(h.relu(), h.tanh())), True),
    "one of two results": (lambda _, h: Both.apply(h.relu(), h.tanh())[0], True),
    "rounded": (lambda _, h: Rounded.apply(h), True),
    "mean of gradients": (lambda _, h: MeanGradient.apply(h), False),
    "mean of gradients, before": (lambda _, h: Swish.apply(MeanGradient.apply(h)), False),
    "snake": (lambda self, h: Snake.apply(h, self.alpha), False),
    "hook": (lambda _, h: hooked(Tanh.apply(h), lambda grad: grad / 2), True),
    "hook of all": (lambda _, h: hooked(h, mean_size), False),
    "type as": (lambda self, h: F.gelu(h).type_as(self.alpha) * torch.ones(1).type_as(h), True),
    "to": (lambda self, h: h.relu().to(self.head.weight) * torch.ones(1).to(h), True),
    "snake by hand": (lambda self, h: h + (h * self.alpha).sin().square() / self.alpha, True),
    "scale of the width": (lambda _, h: h * h.shape[-1] ** -0.5 + h.numel() / h.size(2) / h[..., 0:].shape[-1], True),
    "heads by number": (lambda _, h: h.view(*h.shape[:2], 4, h.size(-1) // 4).softmax(-1).reshape(h.shape), True),
    "prelu": (lambda self, h: F.prelu(h.transpose(1, 2), self.alpha).transpose(1, 2), False),
}


def made(between: Callable[[Any, Tensor], Tensor]) -> Callable[[], nn.Module]:
    class Between(Pair):
        def __init__(self) -> None:
            super().__init__()
            self.alpha = nn.Parameter(torch.rand(HIDDEN) + 0.5)

        def between(self, h: Tensor) -> Tensor:
            return between(self, h)

    return Between


# -- attention, and what meets its heads ------------------------------------------------------------------------


class Attention(nn.Module):
    """Heads of 2 features, with a mask, and with what ``weights`` makes of their scores."""

    heads = 4

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return (scores if mask is None else scores + mask).softmax(-1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (-1, WIDTH // self.heads)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        weights = self.weights(q @ k.transpose(-1, -2), mask)
        return self.head(x + self.out((weights @ v).transpose(1, 2).flatten(2)))


class Alibi(Attention):
    """A slope for each head, [heads, 1, tokens]."""

    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        slopes = 2.0 ** -torch.arange(self.heads)
        return (scores + slopes[:, None, None] * torch.arange(scores.shape[-1])).softmax(-1)


def with_mask(heads: int, step: int) -> Batch:
    batch = vectors(step)
    mask = draw(step + 50, BATCH, heads, TOKENS, TOKENS)
    return {"inputs": {"x": batch["inputs"], "mask": mask}, "labels": batch["labels"]}


def test_an_attention_whose_heads_meet_a_tensor_of_all_heads_is_a_pair() -> None:
    x = torch.ones(2, TOKENS, WIDTH)
    of_heads, of_one = ({"x": x, "mask": torch.ones(2, heads, TOKENS, TOKENS)} for heads in (4, 1))
    for found in (pairs_of(Attention, "1d", of_one, of_heads), pairs_of(Alibi, "1d", x)):
        assert found.splits == {"q": "column", "k": "column", "v": "column", "out": "row"}


# -- the end of a model -----------------------------------------------------------------------------------------


class Probabilities(Pair):
    """Softmax over what its head gives."""

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(super().forward(x), dim=-1)


def likelihood(out: Tensor, batch: Batch) -> tuple[Tensor, int]:
    return F.nll_loss(out.flatten(0, -2), batch["labels"].flatten(), reduction="sum"), batch["labels"].numel()


EXAMPLE = torch.ones(2, TOKENS, WIDTH)
ROWS = {
    row.name: row
    for row in (
        *(unchanged(name, made(each), vectors, classify, example=EXAMPLE) for name, (each, _) in FUNCTIONS.items()),
        *(
            unchanged(f"mask of {heads}", Attention, lambda step, heads=heads: with_mask(heads, step), classify,
                      example={"x": EXAMPLE, "mask": torch.ones(2, heads, TOKENS, TOKENS)})
            for heads in (1, 4)
        ),
        unchanged("alibi", Alibi, vectors, classify, example=EXAMPLE),
        unchanged("log_softmax_head", Probabilities, vectors, likelihood, example=EXAMPLE),
    )
}  # fmt: skip


@cache
def oracle(every: int) -> dict[str, Run]:
    """Of all rows, or of every third."""
    return twins([*ROWS.values()][::every])


@pytest.mark.parametrize("plan", ["1d 2", *long("1d 4", "2d 4", "2.5d 4 (2,1,2)", "3d 8")])
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.long), 3])
def test_nothing_is_refused_for_a_pair_that_nobody_named(plan: str, every: int) -> None:
    wrong = [cell for cell in fill([*ROWS.values()][::every], [plan], oracle(every)) if cell.outcome != "equal"]
    assert not wrong, "\n".join(f"{cell.model} under {cell.plan}: {cell.outcome}: {cell.words}" for cell in wrong)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_pairs_hold_in_backward(name: str) -> None:
    between, is_pair = FUNCTIONS[name]
    found = pairs_of(made(between), "1d", EXAMPLE)
    assert ({"up": "column", "down": "row"}.items() <= found.splits.items()) == is_pair
    if name.startswith("mean of gradients"):
        assert found.reasons["up"].startswith("in backward, mean reduces dim 2, which is split (in")
