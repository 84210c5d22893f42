"""Experts of transformers' models: recognising their modules, and the layer that spreads them over ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from colossus.construct.allocate import value_of
from colossus.layers.routed_experts import RoutedExperts

#: attributes of transformers' classes of experts that are gated linears
_FORM = {"has_gate": True, "has_post_expert_norm": False}
_WEIGHTS, _BIASES = ("gate_up_proj", "down_proj"), ("gate_up_proj_bias", "down_proj_bias")


def is_experts(module: nn.Module) -> bool:
    """Return whether a module takes tokens, choices and weights, and has stacked ``gate_up_proj`` and ``down_proj``."""
    has_form = all(getattr(module, name, None) == value for name, value in _FORM.items())
    if not has_form or "forward" in vars(module):
        return False
    return {*module._parameters} == {*_WEIGHTS, *(_BIASES if module.has_bias else ())}


def routed_experts(module: Any) -> RoutedExperts:
    """Return the layer that computes the same as a module of experts, with the module's values."""
    down, bias = module.down_proj, bool(module.has_bias)
    num_experts, *sizes = down.shape
    ffn_size, hidden_size = sizes if module.is_transposed else sizes[::-1]
    values = zip(("init", "out_init", "bias_init", "out_bias_init"), (*_WEIGHTS, *_BIASES), strict=True)
    inits: Any = {ours: value_of(getattr(module, theirs)) for ours, theirs in values if theirs in module._parameters}
    form: Any = dict(bias=bias, transposed=bool(module.is_transposed), dtype=down.dtype)
    layer = RoutedExperts(hidden_size, ffn_size, num_experts, **inits, **form)
    layer._modules.update(module._modules)
    # its gate takes the products as they lie, and reads numbers and an activation of its first argument
    vars(layer).update({name: value for name, value in vars(module).items() if isinstance(value, int | float)})
    vars(layer)["gated"] = partial(type(module)._apply_gate, layer)
    return layer
