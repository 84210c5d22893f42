"""The module of a config file: its name, and its import in every process that a run starts.

Workers of data loaders that begin with an interpreter of their own get objects of the file's classes, by name. They
receive `sys.path`, which has the file's folder (`colossus.config.loading`), and find the file there.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType

_PREFIX = "colossus_config_"
_LIBRARY = os.path.dirname(os.__file__)
#: entries of `sys.path` that belong to the standard library
_PYTHONS_OWN = {_LIBRARY, os.path.join(_LIBRARY, "lib-dynload")}


def module_name(file: str | os.PathLike[str]) -> str:
    """Return the name of a config file's module."""
    return _PREFIX + re.sub(r"\W", "_", os.path.splitext(os.path.basename(file))[0])


def put_on_path(folder: str = ".") -> None:
    """Let modules of a folder be imported before those of other folders, as Python does beside a script.

    The standard library comes first: libraries that import ``queue`` must not get a ``queue.py`` of the folder.
    """
    with contextlib.suppress(FileNotFoundError):  # a current folder that was removed has no modules
        folder = os.path.realpath(folder)
        others = [entry for entry in _without_pythons_own() if entry != folder]
        sys.path[:] = [*(entry for entry in sys.path if entry in _PYTHONS_OWN), folder, *others]


def _without_pythons_own() -> list[str]:
    return [entry for entry in sys.path if entry not in _PYTHONS_OWN]


class _ConfigFinder(MetaPathFinder):
    """A finder of the file of a config's module in the folders of `sys.path`, except those of the standard library."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(_PREFIX):
            return None
        for folder in _without_pythons_own():
            names: list[str] = []
            with contextlib.suppress(OSError):  # the folder does not exist, or may not be read
                names = os.listdir(folder)
            files = [name for name in names if name.endswith(".py") and module_name(name) == fullname]
            if len(files) > 1:
                raise ImportError(f"{' and '.join(sorted(files))} in {folder} are one module, {fullname}: rename one")
            if files:
                return spec_from_file_location(fullname, os.path.join(folder, files[0]))
        return None


sys.meta_path.append(_ConfigFinder())
