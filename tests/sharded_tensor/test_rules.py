"""Where what is split is after a chain of functions: what is not refused gives the parts of what the whole gives."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch
import torch.nn.functional as F
from helpers.parts import joined, part
from torch import Tensor

BATCH, TOKENS, WIDTH = 4, 8, 12
MAX_DIMS = 5


def any_dim(x: Tensor, random: Random) -> int:
    return random.randrange(-x.dim(), x.dim())


def unflattened(x: Tensor, random: Random) -> Tensor:
    dim = any_dim(x, random)
    return x.unflatten(dim, random.choice([(2, -1), (-1, 2)]))


def last_matrix(x: Tensor) -> Tensor:
    return torch.linspace(-1, 1, x.shape[-1] * 3, dtype=x.dtype).view(x.shape[-1], 3)


#: written without the number of tokens
FUNCTIONS: list[Callable[[Tensor, Random], Tensor]] = [
    lambda x, random: x.transpose(any_dim(x, random), any_dim(x, random)),
    lambda x, random: x.permute(*random.sample(range(x.dim()), x.dim())),
    lambda x, random: x.movedim(any_dim(x, random), any_dim(x, random)),
    lambda x, random: x.flatten(*sorted(random.sample(range(x.dim()), 2))),
    unflattened,
    lambda x, random: x.unsqueeze(random.randrange(-x.dim() - 1, x.dim() + 1)),
    lambda x, random: x.squeeze(),
    lambda x, random: x.reshape(-1, x.shape[-1]),
    lambda x, random: x.reshape(x.shape[0], -1),
    lambda x, random: x.view(*x.shape[:-1], -1, 2).transpose(-3, -2),  # heads
    lambda x, random: x.transpose(-3, -2).flatten(-2),
    lambda x, random: F.unfold(x, 2),
    lambda x, random: x.expand(2, *x.shape),
    lambda x, random: x.repeat(*[1] * (x.dim() - 1), 2),
    lambda x, random: x.sum(any_dim(x, random), keepdim=random.random() < 0.5),
    lambda x, random: x.amax(dim=tuple(random.sample(range(-x.dim(), 0), 2))),
    lambda x, random: x.softmax(any_dim(x, random)),
    lambda x, random: x.cumsum(any_dim(x, random)),
    lambda x, random: x.sort(any_dim(x, random)).values,
    lambda x, random: x.topk(1, any_dim(x, random)).values,
    lambda x, random: x.repeat_interleave(2, any_dim(x, random)),
    lambda x, random: x.flip(any_dim(x, random)),
    lambda x, random: x.roll(1, any_dim(x, random)),
    lambda x, random: x.chunk(2, any_dim(x, random))[0],
    lambda x, random: x.unbind(any_dim(x, random))[0],
    lambda x, random: x.select(any_dim(x, random), 0),
    lambda x, random: x[..., :1],
    lambda x, random: x[:, None, ..., [0, 0]],
    lambda x, random: x[:, torch.zeros(2, 2, dtype=torch.long)],
    lambda x, random: torch.stack([x, x * 2], random.randrange(-x.dim() - 1, x.dim() + 1)),
    lambda x, random: torch.cat([x, -x], any_dim(x, random)),
    lambda x, random: F.pad(x, (1, 0)),
    lambda x, random: x @ last_matrix(x),
    lambda x, random: last_matrix(x.mT).mT @ x,
    lambda x, random: torch.einsum("...a,ab->...b", x, last_matrix(x)),
    lambda x, random: F.layer_norm(x, x.shape[-1:]),
    lambda x, random: x + x.mean(-1, keepdim=True),
]


@pytest.mark.parametrize(("role", "dim"), [("sequence", 1), ("tokens", 1), ("batch", 0), ("features", 2)])
def test_chains_of_functions_are_followed_or_refused(role: str, dim: int) -> None:
    followed = refused = 0
    for seed in range(500):
        random = Random(seed)
        chain = [(random.choice(FUNCTIONS), random.random()) for _ in range(random.randrange(1, 6))]

        def run(x: Tensor) -> Tensor:
            for function, choices in chain:
                x = function(x, Random(choices))
                if x.dim() > MAX_DIMS:
                    raise IndexError
            return x

        x = torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        try:
            whole = run(x)
        except (RuntimeError, IndexError, ValueError, TypeError):  # no chain for torch either
            continue
        try:
            parts = [run(part(half, role, dim)) for half in x.chunk(2, dim)]
        except (ValueError, RuntimeError, IndexError):  # what takes parts apart may also run out of them
            refused += 1
            continue
        followed += 1
        torch.testing.assert_close(joined(parts, role), whole, rtol=1e-10, atol=1e-12, msg=f"chain {seed}")
    assert followed > 100
    assert refused > 100
