"""Names of adapters (`colossus.layers.LoRALinear`) and of the weights below them. No torch.

A linear ``up`` with an adapter has ``up.base.weight``, ``up.first.weight`` and ``up.second.weight``; one with several
outputs has ``qkv.base.query.weight``, ``qkv.second.query.weight``, and ``qkv.first.query.weight`` or one ``first`` for
all. Without its adapter it has ``up.weight`` and ``qkv.query.weight``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class AdaptedWeight(NamedTuple):
    """The names of a weight and of its adapter: base + scale * second @ first."""

    base: str
    first: str
    second: str


def plain_names(names: Collection[str]) -> dict[str, str]:
    """Return the name without adapters -> own name, of all parameters of linears with an adapter."""
    linears = {name.partition(".second.")[0] for name in names if ".second." in name}
    parts = [(name, *name.partition(".base.")) for name in names]
    return {f"{linear}.{rest}": name for name, linear, is_base, rest in parts if is_base and linear in linears}


def adapter_names(names: Collection[str]) -> set[str]:
    """Return the names of the adapters' own parameters."""
    linears = {name.partition(".base.")[0] for name in plain_names(names).values()}
    parts = tuple(f"{linear}.{part}." for linear in linears for part in ("first", "second"))
    return {name for name in names if parts and name.startswith(parts)}


def adapted_weights(names: Collection[str]) -> dict[str, AdaptedWeight]:
    """Return the weights that have an adapter, by their names without it."""
    adapted = {}
    for plain, base in plain_names(names).items():
        linear, _, rest = base.partition(".base.")
        second, own, shared = (f"{linear}.{part}" for part in (f"second.{rest}", f"first.{rest}", "first.weight"))
        if second in names:
            adapted[plain] = AdaptedWeight(base, own if own in names else shared, second)
    return adapted
