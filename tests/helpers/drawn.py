"""How many examples a test of drawn inputs takes where the profile's own number (tests/conftest.py) is not meant."""

from __future__ import annotations

from hypothesis import settings

DEV_EXAMPLES = 25


def examples(by_default: int) -> int:
    """``by_default`` under the profile ``dev``; under ``long`` as many times that as the profile draws more."""
    return by_default * settings.default.max_examples // DEV_EXAMPLES
