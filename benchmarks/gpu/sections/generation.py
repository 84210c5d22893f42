"""Text of a model on the device: with a key/value cache the same tokens as on the CPU, greedy and sampled."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from helpers.inference import LENGTH, MODELS, save

from benchmarks.gpu.ranks import RankPool
from benchmarks.gpu.section import Case, Figures
from colossus.inference import Sampling, generate, load_model
from colossus.inference.config import WeightSource

PROMPTS = ([3, 1, 4, 1, 5], [9], [2, 6, 5])
SAMPLINGS = (None, Sampling(temperature=0.9, top_k=30, top_p=0.95, seed=7))
#: ranks, plan
PLANS: dict[str, tuple[int, list[str]]] = {
    "one process": (1, []),
    "tensor 2": (2, ["parallel.tensor=2"]),
    "pipeline 2": (2, ["parallel.pipeline=2"]),
    "2d": (4, ["parallel.tensor=dict(mode='2d',size=4)"]),
}


def cases(device: torch.device, budget: float) -> Iterator[Case]:
    pool, host = RankPool(device), RankPool(torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        sources = {
            name: host.run(1, _saved, str(Path(folder) / name), model)[0] for name, model in MODELS.items()
        }  # fmt: skip
        for plan in PLANS:
            for name, source in sources.items():
                yield Case(f"{name}, {plan}", partial(_same_text, pool, host, source, plan))
    pool.close()
    host.close()


def _saved(rank: int, device: torch.device, folder: str, model: dict[str, Any]) -> WeightSource:
    Path(folder).mkdir()
    return save(Path(folder), model)


def _same_text(pool: RankPool, host: RankPool, source: WeightSource, plan: str) -> Figures:
    world, overrides = PLANS[plan]
    shared = ["comm.backend=gloo"] if pool.device.type == "cuda" else []
    exact = (
        "train.precision=fp64"  # a token is drawn where probabilities add up to a number: no rounding may turn it over
    )
    by_rank = pool.run(world, _text, source, [*overrides, exact, f"device={pool.device.type}", *shared])
    (wanted,) = host.run(1, _text, source, [exact, "device=cpu"])
    for rank, found in enumerate(by_rank):
        assert found == wanted, f"rank {rank} continues {PROMPTS} with {found}, one process on the CPU with {wanted}"
    return {"tokens": sum(len(tokens) for texts in wanted for tokens in texts)}


def _text(rank: int, device: torch.device, source: WeightSource, overrides: list[str]) -> list[list[list[int]]]:
    model = load_model(source, overrides=overrides)
    found = [generate(model, PROMPTS, max_tokens=LENGTH - 5, sampling=sampling) for sampling in SAMPLINGS]
    model.context.close()
    return found
