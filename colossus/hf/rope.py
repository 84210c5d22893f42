"""Rotary positions in ``config.json``, as transformers 5 writes them and as 4 did. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colossus.hf.settings import Settings

#: of llama3 scaling, as our options name them, too
_FACTORS = ("factor", "low_freq_factor", "high_freq_factor")


def read_rope(settings: Settings) -> dict[str, Any]:
    """Our ``rotary_base`` and ``rotary_scaling``.

    transformers 5 has ``rope_parameters`` with the base in it, 4 has ``rope_theta`` and ``rope_scaling``.
    """
    old, new = settings.get("rope_scaling", {}), settings.get("rope_parameters", {})
    for key, value in (("rope_scaling", old), ("rope_parameters", new)):
        if not isinstance(value, Mapping):
            settings.problems.append(f"{key} = {value!r}: an object is needed")
            return {}
    given = dict(new or old)
    key = "rope_parameters" if new else "rope_scaling"
    kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
    given.pop("type", None)
    base = given.pop("rope_theta", None) or settings.get("rope_theta", 10000.0)
    if type(base) not in (int, float) or not base > 1:
        settings.problems.append(f"rope_theta = {base!r}: a number above 1 is needed")
        base = 10000.0
    options: dict[str, Any] = {"rotary_base": float(base)}
    if given.pop("partial_rotary_factor", 1.0) != 1.0 or settings.get("partial_rotary_factor", 1.0) != 1.0:
        settings.problems.append("partial_rotary_factor: colossus rotates whole heads only")
    if kind == "default":
        return options
    if kind != "llama3":
        settings.problems.append(f"{key}.rope_type = {kind!r}: colossus has 'default' and 'llama3'")
        return options
    wanted = {*_FACTORS, "original_max_position_embeddings"}
    if wrong := sorted(wanted ^ given.keys()):
        settings.problems.append(f"{key} of type llama3: {', '.join(wrong)} is missing, or not known")
        return options
    if any(type(value) not in (int, float) for value in given.values()):
        settings.problems.append(f"{key} = {given!r}: numbers are needed")
        return options
    scaling: dict[str, Any] = {name: float(given[name]) for name in _FACTORS}
    scaling["original_max_position_embeddings"] = int(given["original_max_position_embeddings"])
    return options | {"rotary_scaling": scaling}


def write_rope(options: Any) -> dict[str, Any]:
    """The keys that transformers 4 and 5 read."""
    scaling = options.rotary_scaling.model_dump() if options.rotary_scaling is not None else None
    return {
        "rope_theta": options.rotary_base,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": options.rotary_base, **(scaling or {"rope_type": "default"})},
    }
