"""Every function that torch shows to a tensor type: on parts it gives the parts of what it gives on the whole, or is
refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.parts import joined, part
from torch import Tensor
from torch.overrides import get_testing_overrides

from colossus.sharded_tensor.tensor import ShardedTensor

SHAPE = 4, 6, 8
#: with which a function is called: most know some of them
ARGUMENTS: list[Callable[[Tensor], tuple[Any, ...]]] = [
    lambda x: (x,),
    lambda x: (x, x),
    lambda x: (x, x, x),
    lambda x: (x, 2),
    lambda x: (x, -1),
    lambda x: (x, 0),
    lambda x: (x, 1),
    lambda x: (x, 0, 1),
    lambda x: (x, 1, 2),
    lambda x: (x, -1, True),
    lambda x: (x, (1,)),
    lambda x: (x, (-1,)),
    lambda x: (x, (1, 2)),
    lambda x: (x, 2.0, 3.0),
    lambda x: ([x, x],),
    lambda x: ([x, x], 1),
    lambda x: ([x, x], -1),
    lambda x: (x, torch.ones(1, 1, 1)),
    lambda x: (x, 1, torch.tensor([0, 1])),
    lambda x: (x, -1, torch.tensor([1, 0])),
    lambda x: (x, [1, 0]),
    lambda x: (x > 0, x, x * 2),
    lambda x: (x.long(),),
    lambda x: (x, (slice(None), 0)),
    lambda x: (x, (Ellipsis, None)),
]
#: what is not there, what draws, and what says something else
LEFT_OUT = {
    "__repr__",
    "__reduce_ex__",
    "empty_like",
    "numpy",
    "tolist",
    "set_",
    "normal_",
    "uniform_",
    "bernoulli_",
    "dropout",
}


def called(function: Any, arguments: tuple[Any, ...]) -> Any:
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*arguments)


def wrong_parts(whole: Any, parts: list[Any], role: str) -> Iterator[str]:
    """What of the results of all ranks is not what one process has, in words."""
    if isinstance(whole, (tuple, list)) and not isinstance(whole, torch.Size):
        for one, *others in zip(whole, *parts, strict=True):
            yield from wrong_parts(one, others, role)
    elif isinstance(whole, Tensor):
        found = [joined(parts, role)] if isinstance(parts[0], ShardedTensor) else parts
        for each in found:
            same = each.shape == whole.shape and torch.allclose(each.to(whole.dtype), whole, equal_nan=True)
            if not same:
                yield f"{tuple(each.shape)} of {tuple(whole.shape)}"


@pytest.mark.long
@pytest.mark.parametrize("role", ["features", "sequence", "tokens", "batch"])
def test_no_function_is_wrong_in_silence(role: str) -> None:
    dim = {"batch": 0, "features": 2}.get(role, 1)
    followed = refused = 0
    wrong: list[str] = []
    for function in get_testing_overrides():
        name = getattr(function, "__name__", "")
        if name in LEFT_OUT or "rand" in name:
            continue
        for number, arguments in enumerate(ARGUMENTS):
            x = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            halves = [half.clone() for half in x.chunk(2, dim)]
            try:
                whole = called(function, arguments(x))
            except Exception:  # no call for torch either
                continue
            try:
                parts = [called(function, arguments(part(half, role, dim))) for half in halves]
            except Exception:
                refused += 1
                continue
            followed += 1
            wrong += [f"{name}, arguments {number}: {words}" for words in wrong_parts(whole, parts, role)]
    assert wrong == []
    assert followed > 2000
    assert refused > 800
