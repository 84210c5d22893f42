"""``"package.module:attribute"``, which a config may write in place of a class or function."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from types import ModuleType
from typing import Any


def is_path(name: object) -> bool:
    """Return whether a name is ``"package.module:attribute"``, the path of an import."""
    return isinstance(name, str) and ":" in name


def imported(path: str) -> Any:
    """Return the class or function of ``"package.module:attribute"``; modules beside the config file are found.

    Raises:
        ValueError: there is no such module or attribute (the message has the nearest name), or it cannot be called.
    """
    module_name, _, attribute = path.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *attribute.split("."))):
        raise ValueError(f"{path!r} must be 'package.module:attribute'")
    entry: Any = _module(path, module_name)
    for name in attribute.split("."):
        if not hasattr(entry, name):
            hint = _hint(name, [public for public in dir(entry) if not public.startswith("_")])
            raise ValueError(f"{path!r}: {module_name} has no {attribute!r}{hint}")
        entry = getattr(entry, name)
    if not callable(entry):
        raise ValueError(f"{path!r} is of type {type(entry).__name__}, which cannot be called")
    return entry


def _module(path: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not f"{name}.".startswith(f"{missing}."):  # the module itself imports the missing one
            raise ValueError(f"{path!r}: {name} cannot be imported: {error}") from error
        parent, _, child = missing.rpartition(".")
        places = getattr(importlib.import_module(parent), "__path__", []) if parent else None
        hint = _hint(child, [module.name for module in pkgutil.iter_modules(places)], f"{parent}." if parent else "")
        raise ValueError(f"{path!r}: there is no module {missing!r}{hint}") from None
    except Exception as error:
        raise ValueError(f"{path!r}: importing {name} raised {type(error).__name__}: {error}") from error


def _hint(name: str, names: list[str], before: str = "") -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {before + close[0]!r}?" if close else ""
