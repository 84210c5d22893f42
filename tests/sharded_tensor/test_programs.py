"""Programs of views, slices, sizes and reductions: what is not refused gives the values and gradients of the whole."""

from __future__ import annotations

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
MAX_DIMS = 5
Step = Callable[[Tensor, Random], Tensor]


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
    length = x.shape[1]
    return x[:, random.choice([0, 1]) : random.choice([length - 1, -1, length])]


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
    lambda x, random: x[:, 1:] * x[:, :-1],
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


@pytest.mark.parametrize(("role", "dim"), [("sequence", 1), ("tokens", 1), ("batch", 0), ("features", 2)])
def test_what_is_not_refused_is_that_of_the_whole(role: str, dim: int) -> None:
    verdicts: list[bool] = []
    with thread_ranks(role) as ranks:

        @settings(max_examples=250, derandomize=True, deadline=None, database=None)
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
            (wanted_gradient,) = torch.autograd.grad((wanted * weights).sum(), x)

            def on_rank(rank: int) -> tuple[Tensor, Tensor]:
                leaf = x.detach().clone().requires_grad_()
                out = run(ranks.part(leaf, dim))
                assert out.shape == wanted.shape
                out = ranks.whole(out)
                (gradient,) = torch.autograd.grad((out * weights).sum(), leaf)
                return out, gradient

            try:
                results = ranks.run(on_rank)
            except (ValueError, IndexError):
                verdicts.append(False)
                return
            verdicts.append(True)
            for out, _ in results:
                torch.testing.assert_close(out, wanted, rtol=1e-10, atol=1e-12)
            # each rank has the loss of the whole: of tokens gradients are addends over sequence ranks
            total = sum(gradient for _, gradient in results) / (ranks.size if role == "sequence" else 1)
            torch.testing.assert_close(total, wanted_gradient, rtol=1e-9, atol=1e-10)

        follow()
    assert verdicts.count(True) > 50
    assert verdicts.count(False) > 20
