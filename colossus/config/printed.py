"""The output of ``colossus config``: a config as data and as a file, and the meaning of each key, from the schema."""

from __future__ import annotations

import inspect
import keyword
import re
import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from colossus.config.components import named_components
from colossus.config.errors import ConfigError, subsection
from colossus.config.plans import model_options
from colossus.config.schema import Config
from colossus.registry import nearest

#: a user's name, password or token in an address
_CREDENTIALS = re.compile(r"(?<=://)[^/?#\s@]+@")


def without_credentials(text: str) -> str:
    """Return a text whose addresses have ``***`` in place of the credentials before their ``@``."""
    return _CREDENTIALS.sub("***@", text)


def as_dict(config: Config) -> dict[str, Any]:
    """Return the config as JSON-able data, with the defaults of the model's options filled in.

    Callables are written ``"module:qualname"``, other objects ``"<module:Class>"``, and addresses without credentials:
    what is written down or tracked must not have them.
    """
    sections = plain(config)
    if config.parallel.zero.stage:  # it determines the strategy
        del sections["parallel"]["strategy"]
    options = model_options(config)
    if isinstance(options, BaseModel):
        sections["model"] = {"type": sections["model"]["type"], **plain(options)}
    return sections


def as_source(config: Config) -> str:
    """Return the config as a Python config file. Without callables and objects it can be loaded again."""
    return "".join(f"{key} = {_literal(value, len(key) + 3, '')}\n" for key, value in as_dict(config).items())


def by_path(nest: Any, path: str = "", *, lists: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the values of a nest of such data with their keys: ``comm.data.bytes``.

    Args:
        nest: the data.
        path: path of the nest itself.
        lists: whether a list is a nest, too, with numbers as keys; else it is one value.
    """
    below: Any = dict(enumerate(nest)) if lists and isinstance(nest, list) else nest
    if not isinstance(below, Mapping) or not below:
        yield path, nest
        return
    for key, value in below.items():
        yield from by_path(value, f"{path}.{key}" if path else key, lists=lists)


def _literal(value: Any, column: int, indent: str) -> str:
    if not isinstance(value, dict) or not all(key.isidentifier() and not keyword.iskeyword(key) for key in value):
        return repr(value)
    flat = "dict(" + ", ".join(f"{key}={_literal(item, 0, '')}" for key, item in value.items()) + ")"
    if column + len(indent) + len(flat) <= 110 and "\n" not in flat:
        return flat
    deeper = indent + "    "
    lines = [f"{deeper}{key}={_literal(item, len(key) + 1, deeper)},\n" for key, item in value.items()]
    return "dict(\n" + "".join(lines) + indent + ")"


def plain(value: Any) -> Any:
    """Return a value of a config as JSON-able data; see `as_dict`."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return without_credentials(value)
    if isinstance(value, BaseModel):
        fields = {key: getattr(value, key) for key in type(value).model_fields}
        return {key: plain(item) for key, item in {**fields, **(value.model_extra or {})}.items()}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist") and hasattr(value, "dtype"):  # an array of numpy
        return plain(value.tolist())
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}:{value.__qualname__}"
    return f"<{type(value).__module__}:{type(value).__qualname__}>"


# -- meaning of keys ----------------------------------------------------------------------------------------

_WORDS: dict[Any, str] = {int: "whole number", float: "number", str: "text", bool: "True or False", type(None): "None"}
_LIMITS = {Ge: ("at least", "ge"), Gt: ("above", "gt"), Le: ("at most", "le"), Lt: ("below", "lt")}


def key_help(key: str, config: Config) -> str:
    """Return a line for a key, and one for each key below it.

    Raises:
        ConfigError: if there is no such key.
    """
    keys = list(all_keys(config))
    lines = [": ".join(filter(None, parts)) for parts in keys if f"{parts[0]}.".startswith(f"{key}.")]
    if not lines:
        close = nearest(key, [path for path, _, _ in keys])
        raise ConfigError(f"{key}: no such key" + (f"; did you mean {close}?" if close else ""))
    return "\n".join(lines)


def all_keys(
    config: Config | None = None, section: type[BaseModel] = Config, path: str = ""
) -> Iterator[tuple[str, str, str]]:
    """Yield (key, its type and default, its meaning) of every key, in the order of the schema.

    Args:
        config: config whose model's and strategy's options are included.
        section: section to begin with.
        path: path of that section, with a dot.
    """
    named = named_components(config) if config is not None else ()
    components = {key: component.options(at.type) for key, at, component in named if isinstance(at.type, str)}
    for name, field in section.model_fields.items():
        below = subsection(field.annotation)
        default = "" if field.default is PydanticUndefined else f", by default {field.default!r}"
        kind = "" if below else _type(field.annotation, field.metadata)
        yield path + name, kind + default if kind else "", _comment(section, name)
        if path + name in components:
            below = components[path + name] or below
        if below is not None:
            yield from all_keys(config, below, f"{path}{name}.")


def _comment(section: type[BaseModel], name: str) -> str:
    return next((comment for owner in section.__mro__ if (comment := _comments(owner).get(name))), "")


@cache
def _comments(owner: type) -> dict[str, str]:
    """Return the ``#:`` lines above each field."""
    if owner is BaseModel or not issubclass(owner, BaseModel):
        return {}
    matches = re.findall(r"((?:^ +#:.*\n)+) +(\w+):", inspect.getsource(owner), re.MULTILINE)
    return {name: " ".join(line.strip(" #:") for line in lines.splitlines()) for lines, name in matches}


def _type(annotation: Any, metadata: list[Any]) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(arguments[0], [*metadata, *getattr(arguments[1], "metadata", ())])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(filter(None, (_type(argument, []) for argument in arguments)))
    if origin is typing.Literal:
        return " or ".join(map(repr, arguments))
    if origin is tuple:
        return f"list of {_type(arguments[0], []) or 'objects'}"
    limits = [
        f" {_LIMITS[type(item)][0]} {getattr(item, _LIMITS[type(item)][1]):g}"
        for item in metadata
        if type(item) in _LIMITS
    ]
    return _WORDS.get(annotation, "") + " and".join(limits)
