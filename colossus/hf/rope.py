"""Rotary positions in ``config.json``, as transformers 5 writes them and as 4 did. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colossus.hf.settings import Settings

_LENGTH = "original_max_position_embeddings"
#: of the kinds of scaling, as our options name them, too
_KEYS = {"llama3": ("factor", "low_freq_factor", "high_freq_factor", _LENGTH), "linear": ("factor",)}


def read_rope(settings: Settings) -> dict[str, Any]:
    """Our ``rotary_base`` and ``rotary_scaling``.

    transformers 5 has ``rope_parameters`` with the base in it, 4 has ``rope_theta`` and ``rope_scaling``.
    """
    old, new = settings.get("rope_scaling", {}), settings.get("rope_parameters", {})
    for key, value in (("rope_scaling", old), ("rope_parameters", new)):
        if not isinstance(value, Mapping):
            settings.problems.append(f"{key} = {value!r}: an object is needed")
            return {}
    length = settings.get("original_max_position_embeddings", settings.get("max_position_embeddings"))
    theta = settings.get("rope_theta")
    old, new = (_standard(each, theta, length) if each else {} for each in (old, new))
    if old and new and old != new:
        told = [
            f"{k} = {old.get(k)!r} and {new.get(k)!r}" for k in sorted(old.keys() | new) if old.get(k) != new.get(k)
        ]
        settings.problems.append(
            f"rope_scaling and rope_parameters differ: {', '.join(told)}: take one of the two out, the wrong one"
        )
        return {}
    key = "rope_parameters" if new else "rope_scaling"
    given = new or old
    kind, base = given.pop("rope_type", "default"), given.pop("rope_theta", theta)
    base = 10000.0 if base is None else base
    if type(base) not in (int, float) or not base > 1:
        settings.problems.append(f"rope_theta = {base!r}: a number above 1 is needed")
        base = 10000.0
    options: dict[str, Any] = {"rotary_base": float(base)}
    if given.pop("partial_rotary_factor", 1.0) != 1.0 or settings.get("partial_rotary_factor", 1.0) != 1.0:
        settings.problems.append("partial_rotary_factor: colossus rotates whole heads only")
    if kind == "default":
        return options
    if kind not in _KEYS:
        settings.problems.append(f"{key}.rope_type = {kind!r}: colossus has 'default', {', '.join(map(repr, _KEYS))}")
        return options
    if wrong := sorted({*_KEYS[kind]} ^ given.keys()):
        settings.problems.append(f"{key} of type {kind}: {', '.join(wrong)} is missing, or not known")
        return options
    if any(type(value) not in (int, float) for value in given.values()):
        settings.problems.append(f"{key} = {given!r}: numbers are needed")
        return options
    scaling: dict[str, Any] = {name: float(value) for name, value in given.items()} | {"rope_type": kind}
    if kind == "llama3":
        scaling[_LENGTH] = int(given[_LENGTH])
    return options | {"rotary_scaling": scaling}


def _standard(given: Mapping[str, Any], theta: Any, length: Any) -> dict[str, Any]:
    """With the keys of transformers 5, and what it fills in."""
    found = {key: value for key, value in given.items() if value is not None and key != "type"}
    found.setdefault("rope_type", given.get("type") or "default")
    if theta is not None:
        found.setdefault("rope_theta", theta)
    if found["rope_type"] == "llama3" and length is not None:
        found.setdefault(_LENGTH, length)
    return found


def write_rope(options: Any) -> dict[str, Any]:
    """The keys that transformers 4 and 5 read."""
    scaling = None
    if options.rotary_scaling is not None:
        held = options.rotary_scaling
        scaling = {**{key: getattr(held, key) for key in _KEYS[held.rope_type]}, "rope_type": held.rope_type}
    return {
        "rope_theta": options.rotary_base,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": options.rotary_base, **(scaling or {"rope_type": "default"})},
    }
