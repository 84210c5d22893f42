"""Engines whose initial weights are not drawn, for cases that have others: to draw half a billion takes a minute."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch
from torch import nn

from colossus.construct.build_model import build


@contextmanager
def undrawn() -> Iterator[None]:
    """Inside, `colossus.initialize` leaves zeros in the parameters of our layers."""
    with patch.object(importlib.import_module("colossus.engine.initialize"), "build", partial(build, draw=False)):
        yield


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Matrices get small numbers, drawn where they are, norms ones."""
    for param in model.parameters():
        if param.dim() > 1:
            param.normal_(std=0.02)
    for module in model.modules():
        if getattr(module, "is_norm", False):
            nn.init.ones_(module.weight)  # type: ignore[arg-type]
