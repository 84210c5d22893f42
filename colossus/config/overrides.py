"""Overrides on the command line, ``section.key=value``: parsed, and applied to the sections before validation."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from colossus.config.errors import ConfigError, brief, subsection
from colossus.config.schema import AXES, Config
from colossus.config.section import Named, ShortSection, is_number

SYNTAX = "an override is section.key=value, for example train.steps=50 or parallel.tensor.mode=2d"
#: sections whose keys may stand beside a strategy, which may need a learning rate of its own
_WITH_STRATEGY = ("optimizer.", "lr_schedule.", "train.")
_KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def parse_override(text: str) -> tuple[list[str], Any]:
    """Return the key and value of an override: ``"train.steps=50"`` -> ``(["train", "steps"], 50)``.

    A value that is no Python literal is a string.

    Raises:
        ConfigError: if there is no ``=`` or the key is no dotted name.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{text!r} has no '=': {SYNTAX}")
    if not _KEY.fullmatch(key):
        raise ConfigError(f"{text!r}: {key!r} is no key: {SYNTAX}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "2.5d" is a number with a strange suffix to the parser
            return key.split("."), _literal(ast.parse(value.strip(), mode="eval").body)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return key.split("."), value


def strategy_overrides(text: str) -> list[str]:
    """Return overrides of a strategy: ``"sgp overlap=1"`` gives ``parallel.strategy=sgp parallel.strategy.overlap=1``.

    It replaces the strategy of the file with its options. Keys of ``optimizer``, ``lr_schedule`` and ``train`` may
    stand beside it: ``"sgp optimizer.lr=4e-3"``. A value has no spaces.
    """
    name, *options = text.split() or [""]
    own = [option if option.startswith(_WITH_STRATEGY) else f"parallel.strategy.{option}" for option in options]
    return [f"parallel.strategy={name!r}", *own]


def plan_overrides(text: str) -> list[str]:
    """Return the overrides of a plan as text: overrides, or keys of ``parallel`` without that word.

    ``"parallel.zero=1 schedule.microbatches=4"`` is two overrides; all other keys keep the value of the file. ``"data=2
    tensor=4"`` is a whole plan, ``["parallel.pipeline.size=1", .., "parallel.data=2", "parallel.tensor=4"]``: an axis
    that it does not name has size 1. Overrides may stand beside such keys.
    """
    words = [word if _names_section(word) else f"parallel.{word}" for word in text.split()]
    if all(map(_names_section, text.split())):
        return words
    named = {re.split(r"\W", word.removeprefix("parallel."))[0] for word in words}
    return [f"parallel.{axis}{'' if axis == 'data' else '.size'}=1" for axis in AXES if axis not in named] + words


def _names_section(word: str) -> bool:
    """Return whether a word is an override by itself.

    ``data=2`` is not: it names the axis. ``data.path=..`` is: it names a key of the section.
    """
    section, dot, _ = word.partition("=")[0].partition(".")
    return section in Config.model_fields and (bool(dot) or section not in AXES)


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal, in which a dict may be written as in config files: ``dict(size=2, mode="2d")``."""
    named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict"
    if isinstance(node, ast.Call) and named and not node.args and all(item.arg for item in node.keywords):
        return {str(item.arg): _literal(item.value) for item in node.keywords}
    if isinstance(node, ast.List):
        return [_literal(item) for item in node.elts]
    return ast.literal_eval(node)


def apply_overrides(values: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return a copy of ``values`` (sections of a file) with the overrides applied in their order.

    Raises:
        ConfigError: for text that is no override, and for keys inside of something that is no section.
    """
    sections = _copy(values)
    problems = []
    for text in overrides:
        try:
            path, value = parse_override(text)
            _set(sections, path, value)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return sections


def _set(values: dict[str, Any], path: list[str], value: Any) -> None:
    section: type[BaseModel] | None = Config
    for depth, key in enumerate(path[:-1], start=1):
        section = _section_of(section, key)
        values[key] = values = _as_section(values.get(key), section or Named, ".".join(path[:depth]), path[-1])
    key, section = path[-1], _section_of(section, path[-1])
    is_short = section is not None and issubclass(section, ShortSection) and is_number(value)
    keys = section.keys_of(value) if is_short and isinstance(values.get(key), dict) else None  # type: ignore[union-attr]
    values[key] = value if keys is None else values[key] | keys  # a bare size keeps the mode in the file


def _section_of(section: type[BaseModel] | None, key: str) -> type[BaseModel] | None:
    """Return the class of the section of a key; None for a single value, and for options outside of the schema."""
    field = section.model_fields.get(key) if section is not None else None
    return subsection(field.annotation) if field is not None else None


def _as_section(value: Any, section: type[BaseModel], where: str, key: str) -> dict[str, Any]:
    if value is None:
        return {}
    if isinstance(value, dict):
        return value
    if isinstance(value, BaseModel):
        return dict(value)
    keys = section.keys_of(value) if issubclass(section, ShortSection) and isinstance(value, int | str) else None
    if keys is not None:
        return dict(keys)
    name = getattr(value, "__qualname__", None) or brief(value)
    raise ConfigError(
        f"{where}.{key}: {where} is {name}, which has no keys: write {where} = dict(.., {key}=..) in the config"
    )


def _copy(value: Any) -> Any:
    """Return a copy of nested dicts; all other objects are shared."""
    return {key: _copy(item) for key, item in value.items()} if isinstance(value, Mapping) else value
