"""docs/strategies.md names what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from colossus.registry import GRAPHS, STRATEGIES, STRATEGY_OPTIONS

PAGE = (Path(__file__).parents[1] / "docs" / "strategies.md").read_text()


@pytest.mark.parametrize("strategy", STRATEGY_OPTIONS.names())
def test_every_option_of_a_strategy_has_a_row_with_its_default(strategy: str) -> None:
    for name, field in STRATEGY_OPTIONS.get(strategy).model_fields.items():
        rows = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")]
        assert any(f"`{field.default!r}`" in row for row in rows), f"{name} = {field.default!r} of {strategy}"


def test_no_table_names_an_option_that_one_of_its_strategies_refuses() -> None:
    tables = re.findall(r"\n(`.*`):\n\n\| option \|.*\n\|.*\n((?:\|.*\n)+)", PAGE)
    assert len(tables) > 8
    for heading, rows in tables:
        names = re.findall(r"^\| `(\w+)` \|", rows, re.M)
        for strategy in re.findall("`([^`]+)`", heading):
            assert set(names) <= set(STRATEGY_OPTIONS.get(strategy).model_fields), strategy


def test_every_strategy_and_graph_has_a_row() -> None:
    for name in [*STRATEGIES.names(), *GRAPHS.names()]:
        assert f"\n| `{name}` |" in PAGE, name
