"""A few steps of an optimizer under a plan, and the same of plain torch on one process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from helpers.training import batch_of, config_of, is_key_bias
from helpers.twins import PlainGPT
from torch import Tensor

import colossus
from colossus.state.model_state_dict import full_state_dict

STEPS, CLIP = 5, 0.5
#: weights before and after
Ends = tuple[dict[str, Tensor], dict[str, Tensor]]


def few_steps(plan: dict[str, Any], model: dict[str, Any], section: dict[str, Any] | None, **own: Any) -> Ends:
    """On a rank: with the optimizer of a section, or where that is None with ``optimizer=`` of `initialize`."""
    config = config_of(plan, STEPS, "fp64", train=dict(clip_grad_norm=CLIP), schedule=dict(microbatches=2))
    config |= dict(model=dict(type="GPT", **model), lr_schedule=dict(type="linear", warmup_steps=3, min_ratio=0.1))
    del config["optimizer"]
    engine = colossus.initialize(config | ({} if section is None else dict(optimizer=section)), **own)
    start = full_state_dict(engine.model, engine.context)
    part = engine.config.train.global_batch_size // engine.context.size("data")
    rows = slice(engine.context.index("data") * part, (engine.context.index("data") + 1) * part)
    for step in range(STEPS):
        engine.train_step({key: value[rows] for key, value in batch_of(step).items()})
    end = full_state_dict(engine.model, engine.context)
    engine.close()
    return start, end


def plain_steps(model: PlainGPT, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """The weights behind the same steps of plain torch, without those whose gradient is rounding noise: what is divided
    by its own size, as in Adam, turns that into steps of full size."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    peaks = [group["lr"] for group in groups]
    for step in range(STEPS):
        share = (step + 1) / 3 if step < 3 else 0.1 + 0.9 * (1 - (step - 3) / (STEPS - 3))
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * share
        batch = batch_of(step)
        model.zero_grad()
        total, count = model.loss_sum(batch["inputs"], batch["labels"])
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for optimizer in optimizers:
            optimizer.step()
    return {key: value.detach() for key, value in model.state_dict().items() if not is_key_bias(key)}


def assert_is_plain(ends: Ends, wanted: dict[str, Tensor], what: str) -> None:
    start, end = ends
    assert max((end[key] - start[key]).abs().max() for key in end) > 1e-3
    gaps = {key: (end[key] - value).abs().max().item() for key, value in wanted.items()}
    worst = max(gaps, key=lambda key: gaps[key])
    assert gaps[worst] <= 1e-9, f"{what}: {worst} differs by {gaps[worst]:.3g}"
