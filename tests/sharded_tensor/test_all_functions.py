"""Every function that torch shows to a tensor type: on parts it gives the parts of what it gives on the whole, or is
refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.thread_ranks import thread_ranks
from torch import Tensor
from torch.overrides import get_testing_overrides
from torch.utils._pytree import tree_map_only

SHAPE = 4, 8, 6
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
    "stride",
    "storage_offset",
    "data_ptr",
    "get_device",
    "ndimension",
    "__hash__",
    "_version",
    "nbytes",
}


def called(function: Any, arguments: tuple[Any, ...]) -> Any:
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*arguments)


def wrong_parts(wanted: Any, found: Any) -> Iterator[str]:
    """What a rank has of a result, put together, that is not what one process has, in words."""
    if isinstance(wanted, torch.Size):
        if found != wanted:
            yield f"{found} of {wanted}"
    elif isinstance(wanted, (tuple, list)):
        for one, other in zip(wanted, found, strict=True):
            yield from wrong_parts(one, other)
    elif isinstance(wanted, Tensor):
        wanted, found = (x.to_dense() if x.layout != torch.strided else x for x in (wanted, found))
        same = found.shape == wanted.shape and torch.allclose(found.to(wanted.dtype), wanted, equal_nan=True)
        if not same:
            yield f"{tuple(found.shape)} of {tuple(wanted.shape)}"


@pytest.mark.long
@pytest.mark.parametrize("role", ["features", "sequence", "tokens", "batch"])
def test_no_function_is_wrong_in_silence(role: str) -> None:
    dim = {"batch": 0, "features": 2}.get(role, 1)
    followed = refused = 0
    wrong: list[str] = []
    with thread_ranks(role) as ranks:
        for function in get_testing_overrides():
            name = getattr(function, "__name__", "")
            if name in LEFT_OUT or "rand" in name:
                continue
            for number, arguments in enumerate(ARGUMENTS):
                if "logit" in name and number == 6:  # its eps would be 1
                    continue
                x = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
                try:
                    wanted = called(function, arguments(x.clone()))
                except Exception:  # no call for torch either
                    continue

                def on_rank(rank: int, function: Any = function, arguments: Any = arguments, x: Tensor = x) -> Any:
                    given = arguments(ranks.part(x.clone(), dim))
                    return tree_map_only(Tensor, ranks.whole, function(*given))

                try:
                    torch.manual_seed(1)
                    (found, *_) = ranks.run(on_rank)
                except (ValueError, IndexError, NotImplementedError, TypeError, RuntimeError):
                    refused += 1
                    continue
                followed += 1
                wrong += [f"{name}, arguments {number}: {words}" for words in wrong_parts(wanted, found)]
    assert not wrong, "\n".join(wrong)
    assert followed > 2000
    assert refused > 800
