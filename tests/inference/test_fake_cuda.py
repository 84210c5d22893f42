"""Generation on CUDA devices that do not exist: one wait for each token, which the host has to know."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.fake_cuda import Waits, run_fake_ranks
from helpers.inference import MODELS, save
from helpers.long import but

from colossus.inference.config import Sampling, WeightSource, generation_config
from colossus.inference.decoding import Decoding
from colossus.inference.model import load_model

PLANS: dict[str, tuple[int, list[str]]] = {
    "one": (1, []),
    "1d": (2, ["parallel.tensor=2"]),
    "2d": (4, ["parallel.tensor.mode=2d", "parallel.tensor.size=4"]),
    "2.5d": (8, ["parallel.tensor.mode=2.5d", "parallel.tensor.size=8", "parallel.tensor.depth=2"]),
    "3d": (8, ["parallel.tensor.mode=3d", "parallel.tensor.size=8"]),
    "data": (2, ["parallel.data=2"]),
}


def generated(rank: int, sources: list[WeightSource], overrides: list[str]) -> list[list[list[str]]]:
    """What waits in each step of a decoding, of each model."""
    return [_generated(source, overrides) for source in sources]


def _generated(source: WeightSource, overrides: list[str]) -> list[list[str]]:
    model = load_model(source, generation_config(source, [*overrides, "device=cuda"]))
    assert all(each.is_cuda for each in model.module.parameters())
    sampling = Sampling(temperature=0.7, top_k=5, top_p=0.9)
    decoding = Decoding(model, [[1, 2, 3], [4, 5]], max_tokens=2, sampling=sampling, num_ids=50)
    steps = []
    while not decoding.is_done:
        with Waits(allowed=True) as waits:
            decoding.step()
        steps.append(waits.found)
    model.close()
    return steps


@pytest.mark.parametrize("plan", but(PLANS.keys() - {"1d"}, PLANS))
def test_a_token_is_one_wait(plan: str, tmp_path: Path) -> None:
    sources = [save(tmp_path / name, model, precision="bf16") for name, model in MODELS.items()]
    world, overrides = PLANS[plan]
    (models,) = run_fake_ranks(world, generated, sources, overrides)
    for steps in models:
        assert len(steps) == 3
        for found in steps:
            assert len(found) == 1, found
            assert ".cpu().tolist()" in found[0]
