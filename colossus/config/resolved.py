"""A config as plain data, for ``config.json`` and for reading."""

from __future__ import annotations

import pprint
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from colossus.config.plans import model_options
from colossus.config.schema import Config
from colossus.config.section import Named


def as_dict(config: Config) -> dict[str, Any]:
    """The config as JSON-able data, with the defaults of the model's options filled in.

    Callables are written ``"module:qualname"``, other objects ``"<module:Class>"``.
    """
    out = _plain(config)
    if config.parallel.zero.stage:  # which says what the strategy is
        del out["parallel"]["strategy"]
    options = model_options(config)
    if isinstance(options, BaseModel):
        out["model"] = {"type": out["model"]["type"], **_plain(options)}
    return out


def as_source(config: Config) -> str:
    """The config as a Python config file. Without callables and objects it can be loaded again."""
    sections = as_dict(config).items()
    return "".join(f"{key} = {pprint.pformat(value, width=110, sort_dicts=False)}\n" for key, value in sections)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Named):
        return {key: _plain(item) for key, item in value.spec().items()}
    if isinstance(value, BaseModel):
        return {key: _plain(getattr(value, key)) for key in type(value).model_fields}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist") and hasattr(value, "dtype"):  # an array of numpy
        return _plain(value.tolist())
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}:{value.__qualname__}"
    return f"<{type(value).__module__}:{type(value).__qualname__}>"
