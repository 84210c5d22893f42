"""A measurement of a machine (``colossus doctor --measure``) of small cases, each for a moment."""

from __future__ import annotations

import pytest

from colossus.doctor import device_timing, measure
from colossus.doctor.timing_sizes import Sizes

SMALL = Sizes(("fp32",), (8, 16, 24), 1, 8, (8, 16), 1 << 13, 1 << 13, 1 << 16, (1 << 10, 1 << 12), 0.0, 0)


def shorten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure small cases until the test ends."""
    monkeypatch.setattr(measure, "ON_CPU", SMALL)
    monkeypatch.setattr(device_timing, "CASE_SECONDS", 1e-4)
