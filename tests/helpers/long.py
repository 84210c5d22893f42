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


def mark_the_rest(items: list[pytest.Item], *, complete: bool) -> None:
    """``@pytest.mark.rest("2d", "zb-v-2-3")``: of a test's parameters those that run with ``-m long``, by their ids.

    Raises:
        UsageError: for an id that no parameters have, where the collection is ``complete``.
    """
    missing: dict[str, set[str]] = {}
    for item in items:
        ids = {name for mark in item.iter_markers("rest") for name in mark.args}
        if not ids:
            continue
        assert isinstance(item, pytest.Function)
        function, own = item.nodeid.partition("[")[0], item.callspec.id
        missing.setdefault(function, set(ids)).discard(own)
        if own in ids:
            item.add_marker(pytest.mark.long)
    for function, ids in missing.items():
        if ids and complete:
            raise pytest.UsageError(f"{function} has no parameters {sorted(ids)}")
