"""Experts of transformers' models: which modules they are, and the layer that spreads them over ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from colossus.construct.allocate import value_of
from colossus.layers.routed_experts import RoutedExperts

#: what transformers' classes of experts say of themselves, where they are gated linears without biases, [out, in]
_FORM = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
}


def is_experts(module: nn.Module) -> bool:
    """Whether it is called with tokens, choices and weights, and holds stacked ``gate_up_proj`` and ``down_proj``."""
    has_form = all(getattr(module, name, None) == value for name, value in _FORM.items())
    return has_form and {*module._parameters} == {"gate_up_proj", "down_proj"} and "forward" not in vars(module)


def routed_experts(module: Any) -> RoutedExperts:
    """The layer that computes the same; its values are those of the module's parameters."""
    gate_up, down = module.gate_up_proj, module.down_proj
    num_experts, hidden_size, ffn_size = down.shape
    inits: Any = {"init": value_of(gate_up), "out_init": value_of(down)}
    made = RoutedExperts(hidden_size, ffn_size, num_experts, **inits, dtype=down.dtype)
    made._modules.update(module._modules)
    vars(made)["gated"] = partial(type(module)._apply_gate, made)  # reads the activation off it
    return made
