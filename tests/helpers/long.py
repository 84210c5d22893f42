"""What of a matrix runs by default, and what with ``-m long`` only."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def long(*names: Any) -> list[Any]:
    """Parameters that run with ``-m long``."""
    return [pytest.param(name, marks=pytest.mark.long) for name in names]


def but(rest: Collection[str], names: Iterable[str]) -> list[Any]:
    """The names as parameters, of which the ``rest`` runs with ``-m long``."""
    listed = list(names)
    assert set(rest) <= set(listed), f"there is no {sorted(set(rest) - set(listed))}"
    return [pytest.param(name, marks=pytest.mark.long if name in rest else ()) for name in listed]
