"""Config errors as messages: one short line per problem, never a dump of the validator."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel, ValidationError

from colossus.registry import nearest

#: the message for each of the validator's error types; ``{...}`` are filled from the error's context
MESSAGES = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be True or False",
    "string_type": "must be a string (in quotes)",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} letters",
    "string_pattern_mismatch": "must be a plain file name",
    "too_short": "must not be empty",
    "tuple_type": "must be a tuple or a list",
    "list_type": "must be a list",
    "model_type": "must be a section, dict(...)",
    "model_attributes_type": "must be a section, dict(...)",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
}


class ConfigError(ValueError):
    """A config file, an override or a plan that cannot be used.

    Attributes:
        problems: one string per problem, each starting with the key it is about; further lines of a problem are
            indented.
        source: name of the config file, or None when the config was a dict.
    """

    def __init__(self, problems: str | Iterable[str], source: str | None = None) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        self.source = source
        super().__init__(self.problems, source)

    def __str__(self) -> str:
        where = f"{self.source}: " if self.source else ""
        if len(self.problems) == 1:
            return where + self.problems[0]
        listed = "\n".join("  " + problem.replace("\n", "\n  ") for problem in self.problems)
        return f"{where}{len(self.problems)} problems\n{listed}"


@contextmanager
def as_config_errors(key: str = "", source: str | None = None) -> Iterator[None]:
    """Let other ValueErrors in the block be ConfigErrors.

    Args:
        key: the key, or the option, that they are about.
        source: name of the config file.
    """
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{key}: {error}" if key else str(error), source) from error


def explain(
    error: ValidationError,
    root: type[BaseModel],
    prefix: str = "",
    before: Sequence[str] = (),
    after: Sequence[str] = (),
) -> dict[str, str]:
    """Return the problems of ``error`` by full key path.

    Args:
        error: an error of the validator.
        root: the section class that was validated.
        prefix: the key path of that section, empty for the whole file.
        before, after: further keys that may stand beside those of the section.
    """
    problems: dict[str, str] = {}
    for item in error.errors(include_url=False):
        if item["type"] == "default_factory_not_called":
            continue  # a follow-up of another key's problem, which is reported on its own
        path = ".".join(filter(None, [prefix, *map(str, item["loc"])]))
        if item["type"] == "extra_forbidden":
            section = root
            for key in item["loc"][:-1]:
                section = subsection(section.model_fields[str(key)].annotation) or section
            keys = [*section.model_fields] if len(item["loc"]) > 1 else [*before, *section.model_fields, *after]
            problems[path] = unknown_key(path, list(dict.fromkeys(keys)), None if prefix else root)
        elif item["type"] == "missing":
            wanted = 'needs a type: dict(type="...", **options)' if item["loc"][-1] == "type" else "is missing"
            problems[path] = wanted
        elif item["type"] == "value_error":
            problems[path] = str(item["ctx"]["error"])
        else:
            message = MESSAGES.get(item["type"], item["msg"][:1].lower() + item["msg"][1:])
            limits = {key: f"{x:g}" if isinstance(x, float) else x for key, x in item.get("ctx", {}).items()}
            problems[path] = f"{message.format(**limits)}, got {brief(item['input'])}"
    return problems


def unknown_key(path: str, keys: list[str], root: type[BaseModel] | None = None) -> str:
    """Return the message for a key that a section does not have: the nearest key, and all of them.

    Args:
        path: path of the key.
        keys: keys of the section.
        root: the whole schema, of which another section may have the key.
    """
    section, _, key = path.rpartition(".")
    close = nearest(key, keys)
    suggestion = (_path_of(key, root) if root is not None else None) or (close and f"{section}.{close}".lstrip("."))
    hint = f"; did you mean {suggestion}?" if suggestion else ";"
    return f"no such key{hint} known keys{' of ' + section if section else ''}: {', '.join(keys)}"


def _path_of(key: str, section: type[BaseModel], prefix: str = "") -> str | None:
    """Return the full path of a key in the first section that has it; None for keys of many sections (``type``)."""
    for name, field in section.model_fields.items():
        inner = subsection(field.annotation)
        if name == key and key not in ("type", "size", "mode", "every"):
            return prefix + name
        if inner is not None and (path := _path_of(key, inner, f"{prefix}{name}.")):
            return path
    return None


def brief(value: Any) -> str:
    """Return the ``repr`` of a value, cut to one short line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def subsection(annotation: Any) -> type[BaseModel] | None:
    """Return the section class inside an annotation such as ``Train``, ``Model | None`` or ``Annotated[...]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    sections = (subsection(inner) for inner in typing.get_args(annotation))
    return next((section for section in sections if section is not None), None)
