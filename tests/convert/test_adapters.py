"""Adapters of peft on a model of transformers, parallelized as they are, train as in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.adapters import ADAPTERS
from helpers.user_models.cases import BATCH, Batch, PlainKit, UserModel, integers
from helpers.user_models.table import fill, twins
from helpers.user_models.unchanged import unchanged
from torch import Tensor, nn

SIZES = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, vocab_size=12)


def _batch(step: int) -> Batch:
    return {"inputs": {"input_ids": integers(step, 12, BATCH, 6)}, "labels": integers(step + 1, 12, BATCH, 6)}


def _loss(outputs: Any, batch: Batch) -> tuple[Tensor, int]:
    """Of the tokens behind those that an adapter puts before them."""
    labels = batch["labels"]
    logits = outputs.logits[:, -labels.shape[1] :]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()


def _adapted(kind: str, **options: Any) -> nn.Module:
    import peft
    import transformers

    config = transformers.AutoConfig.for_model("llama", **SIZES, use_cache=False)
    base = transformers.AutoModelForCausalLM.from_config(config)
    made: nn.Module = peft.get_peft_model(base, getattr(peft, kind)(task_type="CAUSAL_LM", **options))
    return made


MODELS: dict[str, UserModel] = {
    name: unchanged(name, lambda kind=kind, options=options: _adapted(kind, **options), _batch, _loss)
    for name, (kind, options) in ADAPTERS.items()
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("names", "plans"),
    [
        (["DoRA", "prompt tuning"], ["data 2", "data 2 zero 3", "1d 2", "2d 4", "3d 4 (2,1,2)"]),
        ([*ADAPTERS][2:], ["data 2 zero 3", "1d 2"]),
    ],
    ids=["DoRA, prompts", "others"],
)
def test_adapters_train_as_in_plain_torch(names: list[str], plans: list[str]) -> None:
    models = [MODELS[name] for name in names]
    with torch.device("meta"):  # imports in the parent, once, what the ranks need
        models[0].make(PlainKit)
    plain = twins(models)
    for plan in plans:
        for cell in fill(models, [plan], plain):
            assert cell.outcome == "equal", f"{cell.model} {cell.plan}: {cell.words}"
