"""Numbers that a schedule is asked for."""

from __future__ import annotations


def require_counts(**counts: int) -> None:
    """Each is a whole number of at least 1.

    Raises:
        ValueError: naming the first that is not.
    """
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
