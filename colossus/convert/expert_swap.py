"""Experts of transformers' models: recognising their modules, and the layer that spreads them over ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from colossus.construct.allocate import value_of
from colossus.layers.routed_experts import RoutedExperts

#: attributes of transformers' classes of experts that are gated linears without biases, [out, in]
_FORM = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
}


def is_experts(module: nn.Module) -> bool:
    """Return whether a module takes tokens, choices and weights, and has stacked ``gate_up_proj`` and ``down_proj``."""
    has_form = all(getattr(module, name, None) == value for name, value in _FORM.items())
    return has_form and {*module._parameters} == {"gate_up_proj", "down_proj"} and "forward" not in vars(module)


def routed_experts(module: Any) -> RoutedExperts:
    """Return the layer that computes the same as a module of experts, with the module's values."""
    gate_up, down = module.gate_up_proj, module.down_proj
    num_experts, hidden_size, ffn_size = down.shape
    inits: Any = {"init": value_of(gate_up), "out_init": value_of(down)}
    layer = RoutedExperts(hidden_size, ffn_size, num_experts, **inits, dtype=down.dtype)
    layer._modules.update(module._modules)
    vars(layer)["gated"] = partial(type(module)._apply_gate, layer)  # it calls the activation of its first argument
    return layer
