"""Where in a model an error was met: which module ran, and the user's line that called what refuses.

Both are found after the fact, among the frames between the error and the engine: a module is the ``self`` of some
frame. So nothing is kept, and nothing costs anything, until something fails.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import traceback
import weakref
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

_Error = TypeVar("_Error", bound=Exception)

_PACKAGE = str(Path(__file__).parent) + os.sep
#: outside of these frames a model is made or called as a whole, which says nothing about where in it an error was met
_DOORS = tuple(
    _PACKAGE + file.replace("/", os.sep)
    for file in (
        "construct/build_model.py",
        "engine/engine.py",
        "engine/initialize.py",
        "engine/stages.py",
        "schedule/executor.py",
    )
)
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = tuple({sysconfig.get_path(kind) + os.sep for kind in ("purelib", "platlib")})

#: characters of a line that are shown
_MAX_SOURCE = 100

_models: weakref.WeakSet[Any] = weakref.WeakSet()


def name_modules_of(model: Any) -> None:
    """From now on errors name the modules of this model by their names in it."""
    _models.add(model)


def located_error(text: str, kind: type[_Error] = ValueError) -> _Error:  # type: ignore[assignment]
    """The error to raise for ``text``; a second line says where in the user's model it is, if it is in one.

    ``(in blocks.3.mlp (MyMLP), at model.py:41: h = self.up(x)[:, 0])``
    """
    place = _place(traceback.walk_stack(sys._getframe(1)))
    return kind(f"{text}\n({place})" if place else text)


def add_place(error: BaseException) -> None:
    """Note on an error that passes the engine where in the model it was met; a `located_error` says so already."""
    trace = error.__traceback__
    place = _place(reversed(list(traceback.walk_tb(trace)))) if isinstance(error, Exception) else ""
    if place and place not in "\n".join([str(error), *getattr(error, "__notes__", ())]):
        error.add_note(f"({place})")


def _place(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Where in a model frames, innermost first, are; empty for none, and rather than to fail over another failure."""
    modules: list[Any] = []
    line = ""
    try:
        module_type = getattr(sys.modules.get("torch.nn"), "Module", ())
        for frame, number in frames:
            file = frame.f_code.co_filename
            if file in _DOORS:
                break
            if not line and is_users(file):
                source = linecache.getline(file, number).strip()[:_MAX_SOURCE]
                line = f"at {file.removeprefix(os.getcwd() + os.sep)}:{number}{source and f': {source}'}"
            owner = frame.f_locals.get("self")
            if isinstance(owner, module_type) and not any(owner is module for module in modules):
                modules.append(owner)
        name = _name(modules) if modules else ""
    except Exception:
        return ""
    return ", ".join(filter(None, (f"in {name}" if name else "", line)))


def _name(modules: list[Any]) -> str:
    """Of the innermost of the modules that ran that has a name: in a model that was built, else in the outermost."""
    for module in modules:
        for root in (*_models, modules[-1]):
            for name, each in root.named_modules() if "_modules" in vars(root) else ():
                if each is module:
                    return f"{name} ({type(module).__name__})" if name else type(module).__name__
    return ""


def is_users(file: str) -> bool:
    """Return whether a file is neither ours, nor torch's, nor Python's own."""
    torch_file = getattr(sys.modules.get("torch"), "__file__", None)
    torch_folder = os.path.dirname(torch_file) + os.sep if torch_file else "<frozen"
    if file.startswith((_PACKAGE, torch_folder, "<frozen", "<eval_with_key>")):
        return False
    return not file.startswith(_STDLIB) or file.startswith(_INSTALLED)
