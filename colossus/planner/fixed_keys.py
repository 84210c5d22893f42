"""The keys that a user fixes while the search chooses the rest: ``keep = dict(pipeline=2, tensor=dict(mode="2d"))``.

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

#: sections that ``keep`` may name; keys of ``parallel`` may also be written without that word
SECTIONS = ("parallel", "schedule", "train")


@dataclass(frozen=True)
class FixedKeys:
    """A config with the fixed values, and the keys that are fixed.

    Attributes:
        stated: the user's config.
        config: the same with the fixed values; its other keys of a plan are ignored.
        keys: full names of the fixed keys: ``parallel.pipeline.size``.
    """

    stated: Config
    config: Config
    keys: frozenset[str]

    @classmethod
    def of(cls, config: Config, keep: Mapping[str, Any] | None = None) -> FixedKeys:
        """Lay values over a config.

        Args:
            config: the config.
            keep: values by key, nested as in a config file.

        Raises:
            ConfigError: there is no such key, or it cannot have this value.
        """
        values: dict[str, Any] = {}
        for key, value in (keep or {}).items():
            if key in SECTIONS:
                values[key] = {**values.get(key, {}), **value} if isinstance(value, Mapping) else value
            else:
                values["parallel"] = {**values.get("parallel", {}), key: value}
        keys: set[str] = set()
        try:
            fixed = Config.model_validate(_with_values(config, values, "", keys))
        except ValidationError as error:
            raise ConfigError(f"{path}: {what}" for path, what in explain(error, Config).items()) from None
        return cls(config, config.model_copy(update={name: getattr(fixed, name) for name in values}), frozenset(keys))

    def allows(self, path: str, section: BaseModel) -> bool:
        """Return whether a section has the fixed values.

        Args:
            path: name of the section: ``parallel.zero``.
            section: the section of a plan.
        """
        fixed: Any = self.config
        for name in path.split("."):
            fixed = getattr(fixed, name)
        keys = [key.rpartition(".")[2] for key in self.keys if key.rpartition(".")[0] == path]
        return all(getattr(section, key, None) == getattr(fixed, key, None) for key in keys)


def _with_values(section: BaseModel, values: Any, path: str, keys: set[str]) -> Any:
    """Return the values of a section's keys with ``values`` over them, and add the full names of these to ``keys``."""
    if isinstance(section, ShortSection) and not isinstance(values, Mapping):
        values = section.keys_of(values) or values
    if not isinstance(values, Mapping):
        return values  # the schema refuses it
    merged = {key: getattr(section, key) for key in section.model_fields_set}
    for key, value in values.items():
        below, full = getattr(section, key, None), f"{path}{key}"
        if isinstance(below, BaseModel):
            merged[key] = _with_values(below, value, f"{full}.", keys)
        else:
            keys.add(full)
            merged[key] = value
    return merged
