"""To how many others a replica sends in a step: a number, or a schedule of numbers. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: (the step from which it holds, the number), by step, the first from step 0
Phases = tuple[tuple[int, int], ...]


def parse_peers(value: Any) -> int | Phases:
    """What a config may say: ``2``, ``{0: 1, 200: 2}`` or ``[(0, 1), (200, 2)]``, from that step on.

    Raises:
        ValueError: for anything else, in words.
    """
    if _is_count(value):
        if value < 1:
            raise ValueError(f"must be at least 1, got {value}")
        return int(value)
    if isinstance(value, Mapping):
        pairs: list[Any] = [(_number(key), number) for key, number in value.items()]
    elif isinstance(value, (list, tuple)) and value and all(isinstance(item, (list, tuple)) for item in value):
        pairs = [tuple(item) for item in value]
    else:
        pairs = []
    if not pairs:
        raise ValueError(f"must be a number, or numbers by the step they begin at: {{0: 1, 200: 2}}, got {value!r}")
    for pair in pairs:
        if len(pair) != 2 or not all(map(_is_count, pair)) or pair[0] < 0 or pair[1] < 1:
            raise ValueError(f"{value!r}: each is a step from 0 and a number of at least 1, but one is {pair!r}")
    pairs.sort()
    steps = [step for step, _ in pairs]
    if steps[0] != 0:
        raise ValueError(f"{value!r}: nothing is said of steps 0 to {steps[0] - 1}; begin with 0")
    twice = next((step for step in steps if steps.count(step) > 1), None)
    if twice is not None:
        raise ValueError(f"{value!r}: step {twice} is named twice")
    return tuple((int(step), int(number)) for step, number in pairs)


def phases_of(peers: int | Phases) -> Phases:
    """A number is one phase."""
    return ((0, peers),) if isinstance(peers, int) else peers


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(key: Any) -> Any:
    """The keys of a mapping that was written as JSON are strings."""
    return int(key) if isinstance(key, str) and key.isdecimal() else key
