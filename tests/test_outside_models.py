"""Models that nobody here wrote, parallelized as they are: every cell equals plain torch, or is refused in words."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from helpers.outside_models import OUTSIDE
from helpers.user_models.table import fill, twins

PLANS = ("data 2", "data 2 zero 3", "1d 2", "1d 4", "2d 4", "2.5d 8", "3d 8", "pipeline 2 1f1b")


def require(names: Sequence[str], plan: str) -> None:
    chosen = [OUTSIDE[name] for name in names]
    wrong = [cell for cell in fill(chosen, [plan], twins(chosen)) if not cell.holds]
    assert not wrong, "\n".join(f"{cell.model} under {cell.plan}: {cell.outcome}: {cell.words}" for cell in wrong)


@pytest.mark.long
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", OUTSIDE)
def test_all_models(name: str, plan: str) -> None:
    require([name], plan)
