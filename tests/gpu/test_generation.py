"""Text of a model with a key/value cache: greedy as plain torch without one, sampled as one process on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.device_ranks import DeviceRanks
from helpers.inference import LENGTH, MODELS, plain, save

from colossus.inference import Sampling, generate, load_model
from colossus.inference.config import WeightSource

PROMPTS = ([3, 1, 4, 1, 5], [9], [2, 6, 5])
NEW_TOKENS = LENGTH - 5
SAMPLINGS = (Sampling(greedy=True), Sampling(temperature=0.9, top_k=30, top_p=0.95, seed=7))
#: world size and plan
PLANS: dict[str, tuple[int, list[str]]] = {
    "one process": (1, []),
    "tensor 2": (2, ["parallel.tensor=2"]),
    "pipeline 2": (2, ["parallel.pipeline=2"]),
    "2d": (4, ["parallel.tensor=dict(mode='2d',size=4)"]),
}


@pytest.fixture(scope="module")
def sources(host_ranks: DeviceRanks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, WeightSource]:
    """Return the folders of weights by model."""
    folder = tmp_path_factory.mktemp("weights")
    return {name: host_ranks.run_one(save_weights, str(folder / name), model) for name, model in MODELS.items()}


def save_weights(rank: int, device: torch.device, folder: str, model: dict[str, Any]) -> WeightSource:
    Path(folder).mkdir()
    return save(Path(folder), model)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("plan", PLANS)
def test_text(
    ranks: DeviceRanks, host_ranks: DeviceRanks, sources: dict[str, WeightSource], plan: str, name: str
) -> None:
    world, overrides = PLANS[plan]
    # a token is drawn where probabilities add up to a number: no rounding may turn it over
    exact = ["train.precision=fp64"]
    transport = [f"comm.backend={ranks.backend(world)}"] if ranks.device.type == "cuda" else []
    settings = [*overrides, *exact, f"device={ranks.device.type}", *transport]
    by_rank = ranks.run(world, continue_prompts, sources[name], settings)
    greedy = ranks.run_one(continue_plainly, sources[name], MODELS[name])
    sampled = host_ranks.run_one(continue_prompts, sources[name], [*exact, "device=cpu"])[1]
    for rank, texts in enumerate(by_rank):
        assert texts[0] == greedy, f"rank {rank} continues {PROMPTS} with {texts[0]}, plain torch with {greedy}"
        assert texts[1] == sampled, f"rank {rank} draws {texts[1]} after {PROMPTS}, one process on the CPU {sampled}"


def continue_prompts(
    rank: int, device: torch.device, source: WeightSource, overrides: list[str]
) -> list[list[list[int]]]:
    model = load_model(source, overrides=overrides)
    texts = [generate(model, PROMPTS, max_tokens=NEW_TOKENS, sampling=sampling) for sampling in SAMPLINGS]
    model.context.close()
    return texts


@torch.no_grad()
def continue_plainly(rank: int, device: torch.device, source: WeightSource, model: dict[str, Any]) -> list[list[int]]:
    twin = plain(source, model).to(device)
    texts = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(NEW_TOKENS):
            with device:
                ids.append(int(twin(torch.tensor([ids]))[0, -1].argmax()))
        texts.append(ids[len(prompt) :])
    return texts
