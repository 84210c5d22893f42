"""Whose call it is: the module and the line of a user's that led to an error, for its message."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from colossus.construct.named_module import NamedModule

_MAX_SOURCE = 80
_LIBRARIES = tuple(str(Path(path).resolve().parent) + "/" for path in (torch.__file__, Path(__file__).parent))


def describe_caller() -> str:
    """Such as ``encoder.mix (Mixer), net.py:12: h = x.mean(1)``; empty outside of modules and of a user's code."""
    frames = list(_frames())
    line = next((frame for frame in frames if not frame.f_code.co_filename.startswith(_LIBRARIES)), None)
    modules = [frame.f_locals["self"] for frame in frames if isinstance(frame.f_locals.get("self"), nn.Module)]
    parts = [_named(modules[0], modules[-1])] if modules else []
    if line is not None:
        path, number = line.f_code.co_filename, line.f_lineno
        source = linecache.getline(path, number).strip()
        source = source if len(source) <= _MAX_SOURCE else source[:_MAX_SOURCE] + " ..."
        parts.append(f"{Path(path).name}:{number}" + (f": {source}" if source else ""))
    return ", ".join(parts)


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _named(module: nn.Module, outermost: nn.Module) -> str:
    name = module.full_name if isinstance(module, NamedModule) else ""
    name = name or next((name for name, other in outermost.named_modules() if other is module), "")
    return f"{name} ({type(module).__name__})" if name else type(module).__name__
