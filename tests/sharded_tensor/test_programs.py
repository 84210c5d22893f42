"""Programs of views, slices, sizes and reductions: what is not refused gives the values and gradients of the whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from random import Random

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from helpers.thread_ranks import thread_ranks
from hypothesis import given, settings
from torch import Tensor

BATCH, TOKENS, WIDTH = 4, 8, 12
#: of the one whom the programs scale by, as all ranks have it
PARAMETER = torch.linspace(0.5, 1.5, 20_000, dtype=torch.float64).requires_grad_()
MAX_DIMS = 5
#: programs of one role
EXAMPLES = int(os.environ.get("PROGRAMS", 250))
Step = Callable[[Tensor, Random], Tensor]


def gradients(out: Tensor, weights: Tensor, x: Tensor) -> list[Tensor]:
    """Return those of x and of the parameter; zeros where a program does not use it."""
    return list(torch.autograd.grad((out * weights).sum(), (x, PARAMETER), allow_unused=True, materialize_grads=True))


def any_dim(x: Tensor, random: Random) -> int:
    return random.randrange(-x.dim(), x.dim())


def last_matrix(x: Tensor) -> Tensor:
    return torch.linspace(-1, 1, x.shape[-1] * 3, dtype=x.dtype).view(x.shape[-1], 3)


def counted(x: Tensor, random: Random) -> Tensor:
    """Add numbers of the elements along a dim, which every rank has whole."""
    dim = any_dim(x, random) % x.dim()
    numbers = torch.arange(x.shape[dim], dtype=x.dtype) / len(x)
    return x + numbers.view(-1, *[1] * (x.dim() - dim - 1)) * x.new_full((1,), 0.5)


def masked(x: Tensor, random: Random) -> Tensor:
    seen = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).tril()
    weights = (x @ x.mT * x.shape[-1] ** -0.5).masked_fill(~seen, float("-inf")).softmax(-1)
    return weights @ x


def cut(x: Tensor, random: Random) -> Tensor:
    dim = any_dim(x, random)
    return x.unflatten(dim, random.choice([(2, -1), (-1, 2), (x.shape[dim] // 4, 4), (4, x.shape[dim] // 4)]))


def sliced(x: Tensor, random: Random) -> Tensor:
    dim = random.choice([0, 1, 1, 1]) if x.dim() > 1 else 0
    length = x.shape[dim]
    chosen = slice(random.choice([0, 0, 1, 3]), random.choice([length - 1, -1, length, length // 2, TOKENS]))
    return x[(slice(None),) * dim + (chosen,)]


def scaled(x: Tensor, random: Random) -> Tensor:
    """Multiply by a parameter that all ranks have whole: of all of a dim and the last, or of the last alone."""
    dim = any_dim(x, random) % x.dim()
    rows = random.choice([1, x.shape[dim]])
    return x * PARAMETER[: rows * x.shape[-1]].view(rows, *[1] * (x.dim() - dim - 2), x.shape[-1])


def attended(x: Tensor, random: Random) -> Tensor:
    while x.dim() < 4:
        x = x.unsqueeze(1)
    key, mask = x.sin(), None
    if random.random() < 0.5:
        key = key[:, :, random.choice([0, 1]) :]
    if random.random() < 0.4:
        mask = torch.arange(x.shape[2])[:, None] + 1 >= torch.arange(key.shape[2])
    return F.scaled_dot_product_attention(x, key, key * 2, mask, is_causal=mask is None and random.random() < 0.5)


def written(x: Tensor, random: Random) -> Tensor:
    """Change in place, by itself or by what is split in another way."""
    y = x.clone()
    return random.choice(
        [lambda: y.mul_(2), lambda: y.add_(x.mT), lambda: y.sub_(x[:, :1]), lambda: y.add_(x[:, 1:])]
    )()


STEPS: list[Step] = [
    lambda x, random: x.transpose(any_dim(x, random), any_dim(x, random)),
    lambda x, random: x.permute(*random.sample(range(x.dim()), x.dim())),
    lambda x, random: x.flatten(*sorted(random.sample(range(x.dim()), 2))),
    cut,
    lambda x, random: x.unsqueeze(random.randrange(-x.dim() - 1, x.dim() + 1)),
    lambda x, random: x.squeeze(),
    lambda x, random: x.reshape(-1, x.shape[-1]),
    lambda x, random: x.reshape(x.shape[0], -1),
    lambda x, random: x.reshape(x.size(0), x.numel() // len(x)),
    lambda x, random: x.view(*x.shape[:-1], -1, 2).transpose(-3, -2),
    lambda x, random: x.view(*x.shape[:-1], -1, x.shape[-1] // 4).transpose(-3, -2),
    lambda x, random: x.view(*x.shape[:-1], 2, x.shape[-1] // 2).transpose(-3, -2),
    lambda x, random: x.transpose(-3, -2).flatten(-2),
    lambda x, random: x * x.shape[any_dim(x, random)] ** -0.5 + 1 / x.numel(),
    counted,
    masked,
    sliced,
    sliced,
    scaled,
    scaled,
    attended,
    attended,
    written,
    lambda x, random: x[:, 1:] * x[:, :-1],
    lambda x, random: x[:, :-1] + x[:, 1:] * PARAMETER[: x.shape[-1]],
    lambda x, random: x[:, random.choice([0, -1, 3])].masked_fill(x[:, 0] > 0, float("inf")).clamp(max=3),
    lambda x, random: x[:, random.choice([0, -1, 3])],
    lambda x, random: x.select(any_dim(x, random), 0),
    lambda x, random: x.expand(2, *x.shape),
    lambda x, random: x.repeat(*[1] * (x.dim() - 1), 2),
    lambda x, random: x.sum(any_dim(x, random), keepdim=random.random() < 0.5),
    lambda x, random: x.mean(tuple(random.sample(range(-x.dim(), 0), 2)), keepdim=random.random() < 0.5),
    lambda x, random: x.amax(dim=tuple(random.sample(range(-x.dim(), 0), 2))),
    lambda x, random: x / x.norm(dim=any_dim(x, random), keepdim=True) + x.logsumexp(any_dim(x, random), True),
    lambda x, random: x - x.var(any_dim(x, random), keepdim=True),
    lambda x, random: x.softmax(any_dim(x, random)),
    lambda x, random: x.cumsum(any_dim(x, random)),
    lambda x, random: x.sort(any_dim(x, random)).values,
    lambda x, random: x.repeat_interleave(2, any_dim(x, random)),
    lambda x, random: x.flip(any_dim(x, random)),
    lambda x, random: x.chunk(2, any_dim(x, random))[0],
    lambda x, random: x[..., :1],
    lambda x, random: x[:, None, ..., [0, 0]],
    lambda x, random: torch.stack([x, x * 2], random.randrange(-x.dim() - 1, x.dim() + 1)),
    lambda x, random: torch.cat([x, -x], any_dim(x, random)),
    lambda x, random: F.pad(x, (1, 0)),
    lambda x, random: x @ last_matrix(x),
    lambda x, random: last_matrix(x.mT).mT @ x,
    lambda x, random: torch.einsum("...a,ab->...b", x, last_matrix(x)),
    lambda x, random: torch.einsum("...ab,...cb->...ac", x, x.sin()),
    lambda x, random: F.layer_norm(x, x.shape[-1:]),
]


@pytest.mark.rest("sequence-1-False", "tokens-1-True")
@pytest.mark.parametrize(
    ("role", "dim", "ring"),
    [("sequence", 1, True), ("sequence", 1, False), ("tokens", 1, True), ("batch", 0, True), ("features", 2, True)],
)
def test_what_is_not_refused_is_that_of_the_whole(role: str, dim: int, ring: bool) -> None:
    """Both orders of tokens: of a ring's a rank has the first and the last, of Ulysses' one run."""
    verdicts: list[bool] = []
    with thread_ranks(role, ring) as ranks:

        @settings(max_examples=EXAMPLES, derandomize=True, deadline=None, database=None)
        @given(
            st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 9)), min_size=1, max_size=5), st.integers(0, 9)
        )
        def follow(program: list[tuple[Step, int]], seed: int) -> None:
            def run(x: Tensor) -> Tensor:
                for step, choices in program:
                    x = step(x, Random(choices))
                    if x.dim() > MAX_DIMS:
                        raise IndexError
                return x

            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()
            try:
                wanted = run(x)
            except (RuntimeError, IndexError, ValueError, TypeError):  # no program for torch either
                return
            weights = torch.randn(wanted.shape, dtype=torch.float64, generator=generator)
            wanted_gradients = gradients(wanted, weights, x)
            if not all(y.isfinite().all() for y in (wanted, *wanted_gradients)):  # the variance of one element
                return

            def on_rank(rank: int) -> tuple[Tensor, list[Tensor]]:
                leaf = x.detach().clone().requires_grad_()
                out = run(ranks.part(leaf, dim))
                assert out.shape == wanted.shape
                out = ranks.whole(out)
                return out, gradients(out, weights, leaf)

            try:
                results = ranks.run(on_rank)
            except (ValueError, IndexError):
                verdicts.append(False)
                return
            verdicts.append(True)
            for out, _ in results:
                torch.testing.assert_close(out, wanted, rtol=1e-10, atol=1e-12)
            # each rank has the loss of the whole: of tokens gradients are addends over sequence ranks
            (x_parts, y_parts) = zip(*(both for _, both in results), strict=True)
            total = sum(x_parts) / (ranks.size if role == "sequence" else 1)
            torch.testing.assert_close(total, wanted_gradients[0], rtol=1e-9, atol=1e-10)
            for part in y_parts if role != "sequence" else [sum(y_parts) / ranks.size]:
                torch.testing.assert_close(part, wanted_gradients[1], rtol=1e-9, atol=1e-10)

        follow()
    assert verdicts.count(True) > 50
    assert verdicts.count(False) > 20
