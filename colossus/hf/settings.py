"""What a ``config.json`` of Hugging Face says, read with the defaults that its family has. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class Settings:
    """The keys of a ``config.json``; what is wrong with them is gathered in ``problems``.

    Only keys that are asked for matter: most others tell how the model was trained, or how to generate with it.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.problems: list[str] = []

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number, at least 1."""
        value = self.get(key, default)
        if type(value) is int and value >= 1:
            return value
        self.problems.append(f"{key} = {value!r}: a whole number, 1 or more, is needed")
        return 1

    def number(self, key: str, default: float, *, below: float | None = None) -> float:
        """A number, not negative."""
        value = self.get(key, default)
        if type(value) in (int, float) and 0 <= value < (below if below is not None else float("inf")):
            return float(value)
        bound = f" below {below:g}" if below is not None else ""
        self.problems.append(f"{key} = {value!r}: a number{bound}, 0 or more, is needed")
        return default

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            self.problems.append(f"{key} = {value!r}: true or false is needed")
            return default
        return value

    def choice(self, key: str, default: str, known: Mapping[str, str]) -> str:
        """What a name means here."""
        value = self.get(key, default)
        if not isinstance(value, str) or value not in known:
            self.problems.append(f"{key} = {value!r}: known are {', '.join(map(repr, known))}")
            return known[default]
        return known[value]

    def require(self, key: str, wanted: Any, default: Any, why: str = "") -> None:
        """A key that must have its usual value, since nothing else is there to do what it says."""
        value = self.get(key, default)
        if value != wanted:
            self.problems.append(f"{key} = {value!r}: colossus has {wanted!r} only{f': {why}' if why else ''}")

    def one_of(self, keys: Sequence[str], default: float, *, below: float | None = None) -> float:
        """A number that several keys must agree on."""
        values = {key: self.number(key, default, below=below) for key in keys}
        if len(set(values.values())) > 1:
            told = ", ".join(f"{key} = {value:g}" for key, value in values.items())
            self.problems.append(f"{told}: colossus has one number for them: give it")
        return values[keys[0]]
