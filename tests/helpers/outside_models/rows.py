"""Rows of the table of models that nobody here wrote: how one is registered, and its run in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from helpers.outside_models.batches import padded, targets
from helpers.user_models.cases import Batch, Loss, PlainKit, UserModel
from helpers.user_models.table import Run, twins
from helpers.user_models.unchanged import unchanged
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from colossus.convert.swap import is_conv1d

STEPS = 3


class Widened(TorchFunctionMode):
    """What is float64 stays so: these models compute norms, softmaxes and routers in float32 whatever their dtype is,
    and its rounding would hide differences below 1e-8."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            if func in (Tensor.to, Tensor.type):
                args = tuple(torch.float64 if each is torch.float32 else each for each in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


OUTSIDE: dict[str, UserModel] = {}


def outside(
    name: str,
    build: Callable[[], nn.Module],
    batch: Callable[[int], Batch],
    *,
    loss: Loss = targets,
    example: bool = False,
    refused: Mapping[str, str] | None = None,
    has_batch_norm: bool = False,
) -> None:
    """Register a function that builds an unmodified model.

    Args:
        example: whether `colossus.parallelize` is given one; of many models of transformers it knows what they are
            called with.
        refused, has_batch_norm: see `UserModel`.
    """
    shown = tree_map(_float32, batch(0)["inputs"]) if example else None
    more = dict(steps=STEPS, around=Widened, has_batch_norm=has_batch_norm)
    OUTSIDE[name] = unchanged(name, build, batch, loss, example=shown, refused=refused, **more)


def _float32(x: Tensor) -> Tensor:
    """Two samples, of the dtype in which models are built."""
    return x[:2].float() if x.is_floating_point() else x[:2]


def text(
    name: str,
    build: Callable[[], nn.Module],
    batch: Callable[[int], Batch],
    *,
    refused: Mapping[str, str] | None = None,
    refused_padded: Mapping[str, str] | None = None,
    **more: Any,
) -> None:
    """Register a model of tokens twice: with full samples, and with padded ones and their mask."""
    outside(name, build, batch, refused=refused, **more)
    padded_too = {**(refused or {}), **(refused_padded or {})}
    outside(f"{name}, padded", build, partial(padded, batch), refused=padded_too, **more)


def oracle_of(name: str, microbatches: int = 1) -> Run:
    """Plain torch, from the values that the unswapped model gets in one process; linears are [out, in], as ours."""
    with torch.device("meta"):  # imports in the parent, once, what the ranks need
        linears = [path for path, module in OUTSIDE[name].make(PlainKit).named_modules() if is_conv1d(module)]
    run = twins([replace(OUTSIDE[name], make=lambda _: OUTSIDE[name].make(PlainKit))], microbatches)[name]
    for state in (run.start, run.end, *run.gradients):
        for path in linears:
            state[f"{path}.weight"] = state[f"{path}.weight"].T
    return run
