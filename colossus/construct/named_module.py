"""A module that is told its place in the model."""

from __future__ import annotations

from torch import nn


class NamedModule(nn.Module):
    """Base of modules whose random streams and errors need their full name.

    Attributes:
        full_name: name in the whole model, set by `colossus.build`; empty before, and for the model itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.full_name = ""
