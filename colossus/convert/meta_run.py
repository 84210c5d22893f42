"""A forward of a whole model on the meta device, after which the model is as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from colossus.convert.forward_flow import ForwardFlow, standing_in
from colossus.convert.forward_parts import call_model
from colossus.random import GLOBAL_RNG


def run_on_meta(
    model: nn.Module, example: Any, calls: Mapping[str, Callable[..., Any]] | None = None
) -> tuple[Any, ForwardFlow]:
    """The output of a model on meta, and what its forward used. A build that runs records nothing of it.

    Args:
        example: an input of the model: a tensor, or a dict of its keyword arguments. One on meta is taken for ones.
        calls: name of a module -> what is called in its place.
    """
    flow = ForwardFlow(model)
    with running_on_meta(model, example) as example, standing_in(model, calls or {}), flow:
        return call_model(model, example), flow


@contextmanager
def running_on_meta(model: nn.Module, example: Any) -> Iterator[Any]:
    """Inside, forwards of a model leave nothing behind: in it, in random numbers, in a build that runs.

    Yields:
        The example, ones in the place of tensors on meta.
    """
    with _disable_current_modes(), GLOBAL_RNG.preserved(), torch.no_grad(), _attributes_kept(model):
        example = tree_map(_with_values, example)
        with _HideDevice():
            yield example


class _HideDevice(TorchFunctionMode):
    """Says of a tensor on meta that it is on the CPU: there is no autocast of the meta device, say."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        return torch.device("cpu") if isinstance(out, torch.device) and out.type == "meta" else out


def _with_values(leaf: Any) -> Any:
    is_meta = isinstance(leaf, Tensor) and leaf.device.type == "meta"
    return torch.ones(leaf.shape, dtype=leaf.dtype) if is_meta else leaf


@contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards, modules have the attributes and buffers that they have now: a forward may keep tables in them."""
    before = [(vars(module), dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    try:
        yield
    finally:
        for attributes, known, buffers in before:
            attributes.clear()
            attributes.update(known)
            attributes["_buffers"].clear()
            attributes["_buffers"].update(buffers)
