"""A trial of whether an optimizer computes the same with the parts of a parameter as with the whole.

AdamW, SGD or Lion compute each element from this element and its gradient. LAMB's norms, Adafactor's means and Muon's
products are over whole matrices: over parts they would silently differ, and differ between plans.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colossus.random import GLOBAL_RNG
from colossus.registry import TORCH_OPTIMIZERS

#: shape of the tried parameter (its first dims, as many as a parameter of the run has), and the cuts in dims 0 and 1.
#: Some classes factor or quantise only tensors larger than 128 x 128, or of 4096 elements or more
_SHAPE, _CUTS = (260, 130, 3, 2, 2), (131, 101)
_STEPS = 4
#: largest relative difference, to the largest change of an element, by rounding of a few steps in float64
_ROUNDING = 1e-6


class UntriedError(Exception):
    """An optimizer could not be tried; the message has its name, the reason, and what to check."""


def trial_problem(optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> str | None:
    """Return what is wrong with an optimizer of parts of parameters, or None.

    A copy of it takes a few steps with a random tensor, whole and in two parts.

    Args:
        optimizer: the optimizer.
        params: its parameters of which this rank stores a part.

    Raises:
        UntriedError: if the copy cannot be made, or takes no step.
    """
    kind = type(optimizer)
    if kind.__module__.startswith("colossus.") or _step_of(kind) in _ELEMENTWISE:
        return None
    chosen: dict[tuple[int, int], nn.Parameter] = {}  # one of each group and number of dims
    group_of = {id(param): index for index, group in enumerate(optimizer.param_groups) for param in group["params"]}
    for param in params:
        chosen.setdefault((group_of[id(param)], param.dim()), param)
    try:
        gaps = [gap for param in chosen.values() for gap in _gaps(optimizer, param)]
    except Exception as error:
        raise UntriedError(
            f"{kind.__name__} could not be tried on parts of a parameter ({type(error).__name__}: {error}): make sure "
            f"that it computes each element from this element alone, or run it on whole parameters, optimizer = "
            f"dict(type=.., whole=True)"
        ) from error
    worst = max(gaps)
    if worst <= _ROUNDING:
        return None
    return (
        f"{kind.__name__} computes something else with parts of a parameter than with the whole (tried on a "
        f"random one: after {_STEPS} steps they differ by {worst:.2g} of the largest change)"
    )


def _step_of(kind: type[torch.optim.Optimizer]) -> Any:
    return inspect.unwrap(kind.step)


_ELEMENTWISE = tuple(_step_of(getattr(torch.optim, name)) for name in TORCH_OPTIMIZERS)


def _gaps(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> list[float]:
    """Return how far the parts of a tensor are from the whole after the last step, for each dim that is cut."""
    shape = _SHAPE[: param.dim()]
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn((_STEPS + 1, *shape), generator=generator, dtype=torch.float64).to(param.device)
    start, gradients = numbers[0], numbers[1:]
    whole = _stepped(optimizer, param, start, gradients)
    change = (whole - start).abs().max().item()
    if not change > 0:
        raise ValueError("it changes nothing in its first steps")
    gaps = []
    for dim, cut in enumerate(_CUTS[: param.dim()]):
        sizes = [cut, shape[dim] - cut]
        parts = [
            _stepped(optimizer, param, part, part_gradients)
            for part, part_gradients in zip(start.split(sizes, dim), gradients.split(sizes, dim + 1), strict=True)
        ]
        gaps.append((torch.cat(parts, dim) - whole).abs().max().item() / change)
    return gaps


def _stepped(optimizer: torch.optim.Optimizer, param: nn.Parameter, start: Tensor, gradients: Tensor) -> Tensor:
    """Return ``start`` after a step with each gradient, by a copy of the optimizer with it in place of ``param``.

    The copy has no other parameters.
    """
    tried = nn.Parameter(start.clone())
    params = [param for group in optimizer.param_groups for param in group["params"]]
    #: id of an object -> its replacement in the copy
    memo: dict[int, Any] = {id(other): nn.Parameter(other.new_empty(0)) for other in params}
    memo[id(param)] = tried
    for state in optimizer.state.values():
        for value in state.values() if isinstance(state, dict) else ():
            if isinstance(value, Tensor) and value.dim():
                memo[id(value)] = torch.zeros_like(tried) + (value.flatten()[0] if value.numel() else 0.0)
    copied = object.__new__(type(optimizer))
    memo[id(optimizer)] = copied
    vars(copied).update(copy.deepcopy(vars(optimizer), memo))
    with GLOBAL_RNG.preserved(0):
        for gradient in gradients:
            tried.grad = gradient.clone()
            copied.step()
    return tried.detach()
