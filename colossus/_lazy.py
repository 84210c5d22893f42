"""Packages whose public names are imported on first use, so that light modules of a package load no torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package whose names are imported on first use.

    Args:
        names: public name -> the submodule that defines it. A submodule that starts with a dot is relative to the
            package's parent. A name equal to its submodule is the submodule itself.
    """

    def getattribute(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = names[name]
        path = f"{package.rpartition('.')[0]}{module}" if module.startswith(".") else f"{package}.{module}"
        imported = importlib.import_module(path)
        value = imported if module == name else getattr(imported, name)
        setattr(sys.modules[package], name, value)
        return value

    return getattribute, lambda: sorted(names)
