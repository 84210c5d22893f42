"""Models that nobody here wrote, parallelized as they are: every cell equals plain torch, or is refused in words."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import pytest
from helpers.outside_models import OUTSIDE, oracle_of
from helpers.user_models.table import fill

#: by default each plan with some models, each model under some plan
SOME = {
    "data 2": ("GPT-NeoX", "x-transformers decoder"),
    "data 2 expert 2": ("Mixtral", "Qwen3-MoE"),
    "data 2 zero 3": ("ViT",),
    "1d 2": ("GPT-2", "Llama", "Qwen3", "T5"),
    "1d 4": ("BERT",),
    "2d 4": ("Llama",),
    "2.5d 8": ("GPT-2",),
    "3d 8": ("Qwen3",),
    "pipeline 2 1f1b": ("Llama", "BERT", "T5"),
}
TIMM = ("timm ViT", "timm MLP-Mixer")


oracle = cache(oracle_of)


def require(names: Sequence[str], plan: str) -> None:
    runs = {name: oracle(name) for name in names}
    wrong = [cell for cell in fill([OUTSIDE[name] for name in names], [plan], runs) if not cell.holds]
    assert not wrong, "\n".join(f"{cell.model} under {cell.plan}: {cell.outcome}: {cell.words}" for cell in wrong)


@pytest.mark.parametrize("plan", SOME)
def test_some_models(plan: str) -> None:
    require(SOME[plan], plan)


@pytest.mark.skipif(find_spec("timm") is None, reason="scripts/test installs timm")
@pytest.mark.parametrize("plan", ["1d 2"])
def test_models_of_timm(plan: str) -> None:
    require(TIMM, plan)


@pytest.mark.long
@pytest.mark.parametrize("plan", SOME)
def test_all_models(plan: str) -> None:
    require([name for name in OUTSIDE if name not in TIMM or find_spec("timm")], plan)
