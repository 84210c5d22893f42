"""The place of an error in a model: the module that ran, and the user's line that called the refused function.

Both are found after the error, among the frames between it and the engine: a module is the ``self`` of some frame. So
nothing is stored, and nothing costs anything, until an error occurs.
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
#: these frames make or call a whole model, so outer frames say nothing about the place in it
_ENTRY_FILES = tuple(
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
    """Let later errors name the modules of this model by their names in it."""
    _models.add(model)


def located_error(text: str, kind: type[_Error] = ValueError) -> _Error:  # type: ignore[assignment]
    """Return the error to raise for ``text``; a second line names its place in the user's model, if it is in one.

    ``(in blocks.3.mlp (MyMLP), at model.py:41: h = self.up(x)[:, 0])``
    """
    place = _place(traceback.walk_stack(sys._getframe(1)))
    return kind(f"{text}\n({place})" if place else text)


def add_place(error: BaseException) -> None:
    """Add a note with the place in the model to an error that passes the engine; a `located_error` has it already."""
    trace = error.__traceback__
    place = _place(reversed(list(traceback.walk_tb(trace)))) if isinstance(error, Exception) else ""
    if place and place not in "\n".join([str(error), *getattr(error, "__notes__", ())]):
        error.add_note(f"({place})")


def _place(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return the place in a model of frames, innermost first; empty for none, and where another error would occur."""
    modules: list[Any] = []
    line = ""
    try:
        module_type = getattr(sys.modules.get("torch.nn"), "Module", ())
        for frame, number in frames:
            file = frame.f_code.co_filename
            if file in _ENTRY_FILES:
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
    """Return the name of the innermost module that has one: in a model that was built, else in the outermost module."""
    for module in modules:
        for root in (*_models, modules[-1]):
            for name, part in root.named_modules() if "_modules" in vars(root) else ():
                if part is module:
                    return f"{name} ({type(module).__name__})" if name else type(module).__name__
    return ""


def is_users(file: str) -> bool:
    """Return whether a file is neither ours, nor torch's, nor Python's own."""
    torch_file = getattr(sys.modules.get("torch"), "__file__", None)
    torch_folder = os.path.dirname(torch_file) + os.sep if torch_file else "<frozen"
    if file.startswith((_PACKAGE, torch_folder, "<frozen", "<eval_with_key>")):
        return False
    return not file.startswith(_STDLIB) or file.startswith(_INSTALLED)
