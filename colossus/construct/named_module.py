"""A module that knows its full name."""

from __future__ import annotations

from torch import nn


class NamedModule(nn.Module):
    """Base of modules whose random streams and error messages need their full name.

    Attributes:
        full_name: name in the whole model, set by `colossus.build`; empty before, and for the model itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.full_name = ""

    def decide_uses(self) -> None:
        """Record what the parameters of a user's modules inside of this one meet, where that is not in the whole
        layout. Called by `colossus.build` on the constructed model, on every rank, before any use."""
