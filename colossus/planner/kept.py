"""What of a plan stays as a user says, while all else is chosen: ``keep = dict(pipeline=2, tensor=dict(mode="2d"))``.

No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from colossus.config import Config, ConfigError
from colossus.config.errors import explain
from colossus.config.section import ShortSection

#: beside ``parallel``, whose keys may be written without that word
SECTIONS = ("parallel", "schedule", "train")


@dataclass(frozen=True)
class Kept:
    """A config with what stays laid over it, and which keys these are.

    Attributes:
        config: whose other keys of a plan count for nothing.
        keys: full ones, ``parallel.pipeline.size``.
    """

    config: Config
    keys: frozenset[str]

    @classmethod
    def of(cls, config: Config, keep: Mapping[str, Any] | None = None) -> Kept:
        """Of a config and values by key, nested as in a config file.

        Raises:
            ConfigError: for a key that there is not, and a value that it cannot have.
        """
        values: dict[str, Any] = {}
        for key, value in (keep or {}).items():
            if key in SECTIONS:
                values[key] = {**values.get(key, {}), **value} if isinstance(value, Mapping) else value
            else:
                values["parallel"] = {**values.get("parallel", {}), key: value}
        keys: set[str] = set()
        try:
            laid = Config.model_validate(_laid_over(config, values, "", keys))
        except ValidationError as error:
            raise ConfigError(f"{path}: {what}" for path, what in explain(error, Config).items()) from None
        return cls(config.model_copy(update={name: getattr(laid, name) for name in values}), frozenset(keys))

    def allows(self, section: str, value: BaseModel) -> bool:
        """Whether a section has the kept values of its keys."""
        given: Any = self.config
        for name in section.split("."):
            given = getattr(given, name)
        keys = [key.rpartition(".")[2] for key in self.keys if key.rpartition(".")[0] == section]
        return all(getattr(value, key, None) == getattr(given, key, None) for key in keys)


def _laid_over(section: BaseModel, values: Any, path: str, keys: set[str]) -> Any:
    """What a section is given, with values over its own; their full keys are added to ``keys``."""
    if isinstance(section, ShortSection) and not isinstance(values, Mapping):
        values = section.keys_of(values) or values
    if not isinstance(values, Mapping):
        return values  # which the schema refuses
    given = {key: getattr(section, key) for key in section.model_fields_set}
    for key, value in values.items():
        below, full = getattr(section, key, None), f"{path}{key}"
        if isinstance(below, BaseModel):
            given[key] = _laid_over(below, value, f"{full}.", keys)
        else:
            keys.add(full)
            given[key] = value
    return given
