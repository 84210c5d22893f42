"""Weights that a forward uses past their module: ``F.linear(x, self.words.weight)`` or ``self.words.weight.shape``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from colossus.convert.forward_flow import ForwardFlow, call_model
from colossus.convert.meta_run import running_on_meta
from colossus.convert.swap import holders_of, row_for
from colossus.layout.parameter_hooks import SIZES

WHY = "code outside the module uses its weight, where a rank needs all of it"


def weights_used_past(model: nn.Module, example: Any) -> set[str]:
    """Return the names of modules whose parameter, or its size, the forward uses otherwise than by a call of them.

    Layers that differ only in their number count alike: a trial may call only some of them (experts).

    Args:
        model: a trial model of `meta_run.with_trials`; it cannot be used for another trial.
        example: an input of the model.
    """
    flow, holders = ForwardFlow(model), holders_of(model)
    names = dict(model.named_parameters())
    for module in model.modules():
        if own := [parameter for parameter in module._parameters.values() if parameter is not None]:
            vars(module)["forward"] = _counting_others(module.forward, flow, own)
    with torch.enable_grad(), running_on_meta(example) as example, flow, _SizesCounted(flow):
        call_model(model, example)
    used = {
        of_any_layer(name)
        for parameter in flow.uses
        if parameter in names
        for name, module, _ in holders[id(names[parameter])]
        if row_for(module) is not None
    }
    return {name for name, _ in model.named_modules() if of_any_layer(name) in used}


class _SizesCounted(TorchFunctionMode):
    """A mode in which reading the size of a parameter counts as a use of it."""

    def __init__(self, flow: ForwardFlow) -> None:
        super().__init__()
        self._flow = flow

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in SIZES:
            self._flow.count(args[0])
        return func(*args, **(kwargs or {}))


def _counting_others(forward: Any, flow: ForwardFlow, own: Sequence[Tensor]) -> Any:
    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        with flow.not_counting(own):
            return forward(*args, **kwargs)

    return call


def of_any_layer(name: str) -> str:
    """Return a name with its numbers replaced by ``*``, except its last part (a module in a Sequential)."""
    path, dot, leaf = name.rpartition(".")
    return re.sub(r"\d+", "*", path) + dot + leaf
