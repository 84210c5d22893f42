"""Packages whose public names are imported on first use, so that light modules of a package load no torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` for ``package``: public name -> the submodule that defines it.

    A name that starts with a dot is relative to this package's parent. The name of a submodule itself is that
    submodule: where ``names`` has its own name for it.
    """

    def getattribute(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = names[name]
        path = f"{package.rpartition('.')[0]}{module}" if module.startswith(".") else f"{package}.{module}"
        found = importlib.import_module(path)
        value = found if module == name else getattr(found, name)
        setattr(sys.modules[package], name, value)
        return value

    return getattribute, lambda: sorted(names)
