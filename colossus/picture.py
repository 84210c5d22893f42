"""Figures of matplotlib, which the extra ``plot`` installs, and which is imported when one is drawn."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

FORMATS = (".svg", ".png", ".pdf")


def check_picture(path: Path) -> None:
    """Raise ValueError unless a picture can be drawn into this file.

    Raises:
        ValueError: the suffix of the file is none of `FORMATS`, its folder does not exist, or matplotlib is missing.
    """
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{path}: the name of a picture ends with {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: no folder {path.parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("a picture needs matplotlib, which comes with an extra: pip install 'colossus[plot]'")


def new_figure(width: float, height: float) -> Any:
    """Return a matplotlib figure of this size in inches that needs no display."""
    return importlib.import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")
