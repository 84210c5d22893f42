"""Functions that a page of docs/ links, and the order in which they are called."""

from __future__ import annotations

import importlib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

import colossus
from colossus import layers

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


def calls_of_a_step(
    rank: int, linked: list[tuple[str, str]], act: Callable[[Any], object], **sections: Any
) -> list[str]:
    """Body of a rank of four: return the linked functions in the order in which ``act(engine)`` calls them first.

    The engine has trained one step of a pair of linears, 1D over two ranks and two replicas; ``sections`` are others
    of its config.
    """
    settings = dict(
        parallel=dict(data=2, tensor=2), train=dict(global_batch_size=4, precision="fp32"), device="cpu", **sections
    )

    def pair() -> nn.Module:
        return nn.Sequential(layers.Linear(6, 10, split="column"), nn.Tanh(), layers.Linear(10, 6, split="row"))

    engine = colossus.initialize(settings, model=pair, loss_fn=lambda y, batch: (y.square().sum(), y.shape[0]))
    engine.train_step(torch.ones(2, 6))
    with order_of_calls(linked) as called:
        act(engine)
    engine.close()
    return called


def _code(name: str, file: str) -> CodeType:
    """Return the code of the function that a link names."""
    entry: Any = importlib.import_module(file.replace("/", "."))
    for part in name.split("."):
        entry = getattr(entry, part)
    code: CodeType = getattr(entry, "__wrapped__", entry).__code__
    return code
