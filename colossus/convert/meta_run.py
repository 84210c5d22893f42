"""Trial models equal to one that is being built, and their forwards on the meta device, before that one is swapped."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from colossus.construct.allocate import construct_again, has_values
from colossus.convert.forward_flow import ForwardFlow, call_model, standing_in
from colossus.random import GLOBAL_RNG


def with_trials(factory: Callable[[], nn.Module]) -> tuple[nn.Module, Callable[[], nn.Module]]:
    """Return the model that ``factory`` makes in the current build, and a function that makes equal models to try.

    A forward may leave anything in a model (tables, hooks, statistics), so each trial runs on a model of its own, which
    the build does not see. It is on the meta device, in training mode as the model of an engine is, and made by a
    second call of the factory with the same random numbers. Where parameters have values already (they were read from
    files, or the model was made before), a second call could cost much, or return the same modules: then the trial is a
    copy.
    """
    state = GLOBAL_RNG.get_state()
    model = factory()

    def make_trial() -> nn.Module:
        with GLOBAL_RNG.preserved():
            GLOBAL_RNG.set_state(state)
            trial = None if any(map(has_values, model.parameters())) else construct_again(factory)
            if trial is None or {*map(id, trial.modules())} & {*map(id, model.modules())}:
                trial = copied_to_meta(model)
        if _shapes(trial) != _shapes(model):
            raise ValueError(
                f"{type(model).__name__}: a second call of its factory returns a model with other parameters. The "
                f"forward is tried on a second model: the factory must make the same model whenever it is called"
            )
        if not trial.training:
            trial.train()
        return trial

    return model, make_trial


def copied_to_meta(model: nn.Module) -> nn.Module:
    """Return a copy whose parameters are on the meta device."""
    with _disable_current_modes():
        memo: dict[int, Any] = {
            id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            for parameter in model.parameters()
        }
        try:
            return copy.deepcopy(model, memo)
        except Exception as error:
            raise ValueError(
                f"{type(model).__name__} cannot be copied for a trial on the meta device ({error}): make it in the "
                f"factory, without reading weights"
            ) from error


def _shapes(model: Any) -> Any:
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def run_on_meta(
    model: nn.Module, example: Any, calls: Mapping[str, Callable[..., Any]] | None = None
) -> tuple[Any, ForwardFlow]:
    """Return the output of a model on meta, and the mode with the uses of its forward.

    Args:
        model: a trial model; it cannot be used for another trial.
        example: an input of the model: a tensor, or a dict of its keyword arguments. A tensor on meta stands for ones.
        calls: name of a module -> the function that is called in its place.
    """
    flow = ForwardFlow(model)
    with torch.enable_grad(), running_on_meta(example) as example, standing_in(model, calls or {}), flow:
        return call_model(model, example), flow


@contextmanager
def trying(example: Any) -> Iterator[Any]:
    """Let forwards inside the context change only their model, not random numbers or the current build.

    Yields:
        The example, with ones in place of tensors on meta.
    """
    with _disable_current_modes(), GLOBAL_RNG.preserved():
        yield tree_map(_with_values, example)


@contextmanager
def running_on_meta(example: Any) -> Iterator[Any]:
    """Try a model on the meta device as `trying` does; its tensors say that they are on the CPU."""
    with trying(example) as example, _HideDevice():
        yield example


class _HideDevice(TorchFunctionMode):
    """A mode in which a tensor on meta says that it is on the CPU; autocast, for one, has no meta device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:  # it compares devices before any operator is called
            args, kwargs = _on_one_device(args, kwargs)
        out = func(*args, **kwargs)
        return torch.device("cpu") if isinstance(out, torch.device) and out.type == "meta" else out


def _on_one_device(args: Any, kwargs: Any) -> Any:
    """Return the arguments, all on meta if one is; a ``new_empty`` into which values were written is not."""
    with torch._C.DisableTorchFunction():  # a build hides the device
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        with_values = {id(tensor) for tensor in tensors if tensor.device.type != "meta"}
    if len(with_values) == len(tensors):
        return args, kwargs
    with _disable_current_modes():  # the flow would keep the values of tensors that depend on no parameter
        return tree_map(lambda leaf: leaf.to("meta") if id(leaf) in with_values else leaf, (args, kwargs))


def _with_values(leaf: Any) -> Any:
    is_meta = isinstance(leaf, Tensor) and leaf.device.type == "meta"
    return torch.ones(leaf.shape, dtype=leaf.dtype) if is_meta else leaf
