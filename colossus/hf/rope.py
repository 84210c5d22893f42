"""Rotary positions in ``config.json``, as transformers 5 writes them and as 4 did. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LENGTH = "original_max_position_embeddings"
#: of the kinds of scaling, as our options name them, too
_KEYS = {"llama3": ("factor", "low_freq_factor", "high_freq_factor", _LENGTH), "linear": ("factor",)}


def read_rope(config: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Our ``rotary_scaling``, and ``rotary_base`` where it is not in ``rope_theta``.

    transformers 5 has ``rope_parameters`` with the base in it, 4 has ``rope_theta`` and ``rope_scaling``.
    """
    given = {key: config.get(key) or {} for key in ("rope_scaling", "rope_parameters")}
    for key, value in given.items():
        if not isinstance(value, Mapping):
            problems.append(f"{key} = {value!r}: an object is needed")
            return {}
    old, new = (_standard(each, config) if each else {} for each in given.values())
    if old and new and old != new:
        differ = sorted(key for key in old.keys() | new if old.get(key) != new.get(key))
        pairs = ", ".join(f"{key} = {old.get(key)!r} and {new.get(key)!r}" for key in differ)
        problems.append(f"rope_scaling and rope_parameters differ: {pairs}: take one of the two out, the wrong one")
        return {}
    key, rope = ("rope_parameters", new) if new else ("rope_scaling", old)
    partial = (rope.pop("partial_rotary_factor", None), config.get("partial_rotary_factor"))
    if any(factor not in (None, 1.0) for factor in partial):
        problems.append("partial_rotary_factor: colossus rotates whole heads only")
    kind = rope.pop("rope_type", "default")
    found = {"rotary_base": rope.pop("rope_theta")} if "rope_theta" in rope else {}
    if kind == "default":
        return found
    if not isinstance(kind, str) or kind not in _KEYS:
        problems.append(f"{key}.rope_type = {kind!r}: colossus has 'default', {', '.join(map(repr, _KEYS))}")
    elif wrong := sorted({*_KEYS[kind]} ^ rope.keys()):
        problems.append(f"{key} of type {kind}: {', '.join(wrong)} is missing, or not known")
    return found | {"rotary_scaling": {**rope, "rope_type": kind}}


def _standard(rope: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """With the keys of transformers 5, and what it fills in."""
    found = {key: value for key, value in rope.items() if value is not None and key != "type"}
    found.setdefault("rope_type", rope.get("type") or "default")
    length = config.get(_LENGTH) or config.get("max_position_embeddings")
    if config.get("rope_theta") is not None:
        found.setdefault("rope_theta", config["rope_theta"])
    if found["rope_type"] == "llama3" and length is not None:
        found.setdefault(_LENGTH, length)
    return found


def write_rope(options: Any) -> dict[str, Any]:
    """The keys that transformers 4 and 5 read, beside ``rope_theta``."""
    held, scaling = options.rotary_scaling, None
    if held is not None:
        scaling = {**{key: getattr(held, key) for key in _KEYS[held.rope_type]}, "rope_type": held.rope_type}
    parameters = {"rope_theta": options.rotary_base, **(scaling or {"rope_type": "default"})}
    return {"rope_scaling": scaling, "rope_parameters": parameters}
