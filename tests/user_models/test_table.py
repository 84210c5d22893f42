"""Models as people write them, under every plan: each cell equals plain torch, or is refused in the words given."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from helpers.long import long
from helpers.user_models import MODELS
from helpers.user_models.table import PLANS, Run, fill, twins

#: what runs by default: each of another kind
SOME = ("gated", "rows_by_mask", "two_inputs", "tied_by_hand", "written_in_place", "norm_inside_of_a_pair",
        "transformer_of_pairs", "masked_attention", "vision_transformer", "weight_norm", "gradient_hooks",
        "generator_in_constructor", "checkpointed_reentrant", "number_of_heads_model",
        "sizes_of_weights_model")  # fmt: skip


@cache
def oracle(names: tuple[str, ...]) -> dict[str, Run]:
    return twins([MODELS[name] for name in names])


def require(names: Sequence[str], plan: str) -> None:
    chosen = [MODELS[name] for name in names]
    wrong = [cell for cell in fill(chosen, [plan], oracle(tuple(names))) if not cell.holds]
    assert not wrong, "\n".join(f"{cell.model} under {cell.plan}: {cell.outcome}: {cell.words}" for cell in wrong)


@pytest.mark.parametrize("plan", ["1d 2", "pipeline 2 zb-h1", *long("3d 4 (2,1,2)")])
@pytest.mark.rest("pipeline 2 zb-h1")
def test_some_models(plan: str) -> None:
    require(SOME[::2] if plan.startswith("3d") else SOME, plan)


def test_blocks_that_are_gathered_and_freed() -> None:
    """One that runs twice in a row, one whose backward is differentiated, one that is written to, one never called."""
    require(("shared_block", "plain_forces", "ema_teacher", "two_heads", "checkpointed_reentrant"), "data 2 zero 3")


@pytest.mark.long
@pytest.mark.parametrize("plan", PLANS)
def test_all_models(plan: str) -> None:
    require(tuple(MODELS), plan)


def test_the_table_is_large_and_says_what_it_expects() -> None:
    assert len(MODELS) >= 25
    for model in MODELS.values():
        assert {*model.refused, *model.differs} == {
            start for start in (*model.refused, *model.differs) if any(plan.startswith(start) for plan in PLANS)
        }, f"{model.name} names a plan that is not there"
