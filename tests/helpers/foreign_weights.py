"""A model that has the weights of another program's folder, under a plan: logits, and a step of training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import colossus
from colossus import layers
from colossus.checkpoint import full_state_dict

VOCABULARY, TOKENS = 31, 7
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "1d": (2, dict(tensor=2)),
    "2d": (4, dict(tensor=dict(mode="2d", size=4))),
    "zero 3, pipeline": (4, dict(data=2, zero=3, pipeline=2)),
}


def batch() -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY, (4, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    return dict(inputs=ids[:, :-1], labels=ids[:, 1:])


def train_from(
    rank: int, model: dict[str, Any], parallel: dict[str, Any], weights: str
) -> tuple[Tensor | None, float, dict[str, Tensor]]:
    """Body of a rank: return the logits of the batch, the loss of a step and whole gradients by name.

    Args:
        rank: the rank.
        model: spec of the model, in float64.
        parallel: the plan; the logits are None but for one process and 1D over two ranks.
        weights: the folder.
    """
    engine = colossus.initialize(
        dict(
            parallel=parallel, model=model, optimizer=dict(type="SGD", lr=0.1), checkpoint=dict(weights=weights),
            train=dict(global_batch_size=4, precision="fp64", clip_grad_norm=None), device="cpu",
        )
    )  # fmt: skip
    assert engine.checkpoints.load_weights(weights).is_complete
    logits = None
    if parallel in ({}, dict(tensor=2)):
        with torch.no_grad():
            logits = layers.to_whole(engine.model.eval()(batch()["inputs"]))
        engine.model.train()
    index, count = engine.context.index("data"), engine.context.size("data")
    loss = engine.train_step({name: value.chunk(count)[index] for name, value in batch().items()}).loss
    gradients = full_state_dict(engine.model, engine.context, gradients=True)
    engine.close()
    return logits, loss, gradients
