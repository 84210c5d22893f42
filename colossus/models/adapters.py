"""Adapters on the linears of a decoder, by its option ``lora`` (2106.09685)."""

from __future__ import annotations

from typing import Any

from colossus.layers.linear import Linear
from colossus.layers.lora import LoRALinear
from colossus.models.tuning_options import TARGETS, LoRAOptions

#: linear of a block -> its outputs, "" where it is one, and the targets that name them
_LINEARS = {
    ("attention", "qkv"): {"query": "query", "key": "key", "value": "value"},
    ("attention", "out"): {"": "out"},
    ("mlp", "up"): {"gate": "gate", "value": "up", "": "up"},
    ("mlp", "down"): {"": "down"},
}


def adapt(model: Any, wanted: LoRAOptions) -> None:
    """Freeze a decoder, and put adapters on the linears of its blocks, which alone are trained.

    Raises:
        ValueError: if no block has a linear that is named, or ranks have copies of key and value heads.
    """
    model.requires_grad_(False)
    adapted: dict[str, int] = dict.fromkeys(wanted.targets or TARGETS, 0)
    for number, block in enumerate(model.blocks):
        for (part, name), targets in _LINEARS.items():
            owner = getattr(block, part)
            base = getattr(owner, name, None)
            outputs = getattr(base, "outputs", {}) if isinstance(base, Linear) else targets if base is not None else {}
            chosen = [output for output in outputs if targets.get(output) in adapted]
            if not chosen:
                continue
            if not isinstance(base, Linear):
                raise ValueError(
                    f"model.lora: blocks.{number}.{part}.{name} is a {type(base).__name__}, whose key and value heads "
                    f"several tensor ranks have copies of: use at most num_kv_heads ranks of parallel.tensor, or "
                    f"leave query, key and value out of model.lora.targets"
                )
            own = chosen if base.is_fused else None
            setattr(owner, name, LoRALinear(base, wanted.rank, wanted.alpha, own))
            for output in chosen:
                adapted[targets[output]] += 1
    missing = [target for target, count in adapted.items() if not count]
    if missing and (wanted.targets is not None or len(missing) == len(adapted)):
        raise ValueError(f"model.lora.targets: the blocks of this model have no linear {', '.join(missing)}")
