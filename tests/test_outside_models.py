"""Models that nobody here wrote, parallelized as they are: every cell equals plain torch, or is refused in words."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import pytest
from helpers.outside_models import OUTSIDE, oracle_of
from helpers.user_models.table import PLANS, fill

#: by default: most plans with some models, most kinds of models under some plan
SOME = {
    "data 2": ("x-transformers decoder",),
    "data 2 expert 2": ("Mixtral",),
    "data 2 zero 3": ("ViT",),
    "1d 2": ("T5", "DeepSeek-V2"),
    "2d 4": ("Llama",),
    "pipeline 2 1f1b": ("BERT", "T5"),
}
#: with all models
ALL = ("data 2", "data 2 zero 3", "1d 2", "2d 4", "3d 8", "pipeline 2 1f1b")
#: with these
MORE = {
    "data 2 expert 2": ("Mixtral", "Qwen3-MoE"),
    "1d 4": ("GPT-2", "Llama", "Llama, padded", "Qwen3-MoE", "T5", "ViT", "x-transformers decoder"),
    "2.5d 8": ("GPT-2", "Llama", "Llama, padded", "Qwen3-MoE", "T5", "ViT", "x-transformers decoder"),
}


oracle = cache(oracle_of)


def require(names: Sequence[str], plan: str) -> None:
    microbatches = PLANS[plan].schedule.get("microbatches", 1)
    runs = {name: oracle(name, microbatches if OUTSIDE[name].has_batch_norm else 1) for name in names}
    wrong = [cell for cell in fill([OUTSIDE[name] for name in names], [plan], runs) if not cell.holds]
    assert not wrong, "\n".join(f"{cell.model} under {cell.plan}: {cell.outcome}: {cell.words}" for cell in wrong)


@pytest.mark.parametrize("plan", SOME)
@pytest.mark.rest("2d 4", "data 2", "pipeline 2 1f1b")
def test_some_models(plan: str) -> None:
    require(SOME[plan], plan)


@pytest.mark.skipif(find_spec("timm") is None, reason="scripts/test installs timm")
def test_a_model_of_timm() -> None:
    require(["timm MLP-Mixer"], "1d 2")


@pytest.mark.long
@pytest.mark.parametrize("plan", ALL)
def test_all_models(plan: str) -> None:
    require(list(OUTSIDE), plan)


@pytest.mark.long
@pytest.mark.parametrize("plan", MORE)
def test_more_plans(plan: str) -> None:
    require(MORE[plan], plan)
