"""Functions that a page of docs/ links, and the order in which they are called."""

from __future__ import annotations

import importlib
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_DOCS = Path(__file__).parents[2] / "docs"


def links(page: str, heading: str = "") -> list[tuple[str, str]]:
    """Return (function, file without ``.py``) of each link to code, of a whole page or below one of its headings."""
    text = (_DOCS / f"{page}.md").read_text()
    if heading:
        text = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"\[`([\w.]+)`\]\(\.\./(colossus/[\w/]+)\.py\)", text)


@contextmanager
def order_of_calls(linked: list[tuple[str, str]]) -> Iterator[list[str]]:
    """Yield a list that has the linked functions, each once, in the order in which they are called inside.

    Calls count of this thread, and of threads that are started inside.
    """
    names = {_code(name, file): name for name, file in linked}
    called: list[str] = []

    def look(frame: FrameType, event: str, arg: Any) -> None:
        name = names.get(frame.f_code) if event == "call" else None
        if name is not None and name not in called:
            called.append(name)

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        yield called
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@contextmanager
def calls_of_children(linked: list[tuple[str, str]], file: Path) -> Iterator[None]:
    """Let the processes that are forked inside append the linked functions to a file, when they first call them."""
    names = {_code(name, module): name for name, module in linked}
    parent = os.getpid()

    def look(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code in names and os.getpid() != parent:
            with file.open("a") as lines:
                lines.write(names[frame.f_code] + "\n")

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


def _code(name: str, file: str) -> CodeType:
    """Return the code of the function that a link names."""
    entry: Any = importlib.import_module(file.replace("/", "."))
    for part in name.split("."):
        entry = getattr(entry, part)
    code: CodeType = getattr(entry, "__wrapped__", entry).__code__
    return code
