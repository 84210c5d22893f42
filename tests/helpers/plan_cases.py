"""Plans of a few ranks whose bytes are predicted, counted without values, and measured."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from helpers.layouts import Samples
from helpers.training import SIZES, config_of
from torch import Tensor, nn

#: so large that buffers of a few hundred bytes do not count
MODEL = {**SIZES, "hidden_size": 64, "vocab_size": 530, "seq_len": 64}
MOE = dict(type="Llama", **MODEL, experts=dict(num=4, top_k=2))


class Scale(nn.Module):
    by: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("by", torch.ones(100, 64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by[0]


class Buffered(nn.Sequential):
    """A chain whose first stage has a buffer."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(nn.Embedding(530, 64), Scale(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 530))

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        labels = batch["labels"].flatten()
        return F.cross_entropy(outputs.flatten(0, 1), labels, reduction="sum"), labels.numel()


class Spare(nn.Module):
    """No chain; one of its layers is never used."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__()
        self.embedding, self.spare, self.head = nn.Embedding(530, 64), nn.Linear(64, 64), nn.Linear(64, 530)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(F.gelu(self.embedding(ids)))

    loss = Buffered.loss


Case = tuple[dict[str, Any], dict[str, Any]]
MB2, MB4 = dict(schedule=dict(microbatches=2)), dict(schedule=dict(microbatches=4))
BF16_MASTERS = dict(train=dict(precision=dict(params="bf16")))

#: on two ranks
CASES: dict[str, Case] = {
    "data": (dict(data=2), MB2),
    "1d": (dict(tensor=dict(size=2, sequence_sharded=True)), dict(train=dict(activation_checkpoint="full"), **MB2)),
    "zero_2_masters": (dict(data=2, zero=2), {**BF16_MASTERS, **MB2}),
    "zero_3": (dict(data=2, zero=3), {}),
    "pipeline": (dict(pipeline=2), MB4),
}
MORE_CASES: dict[str, Case] = {
    "one_microbatch": (dict(data=2), {}),
    "bf16": (dict(data=2), dict(train=dict(precision="bf16"))),
    "masters": (dict(data=2), {**BF16_MASTERS, **MB2}),
    "zero_1_muon": (dict(data=2, zero=1), dict(optimizer=dict(type="Muon", lr=1e-3, weight_decay=0.0))),
    "adafactor": (dict(tensor=2), dict(optimizer=dict(type="Adafactor", lr=1e-3, weight_decay=0.0), **MB2)),
    "whole": (dict(data=2, zero=1), dict(optimizer=dict(type="Adam", whole=True, weight_decay=0.0))),
    "sgd": (dict(data=2, zero=3), dict(optimizer=dict(type="SGD", momentum=0.9, weight_decay=0.0))),
    "ring": (dict(sequence=2), {}),
    "ulysses": (dict(sequence=dict(size=2, mode="ulysses")), MB2),
    "interleaved": (
        dict(pipeline=2),
        dict(model=dict(num_layers=4), schedule=dict(type="interleaved", microbatches=4, chunks=2)),
    ),
    "llama": (dict(pipeline=2), dict(model=dict(type="Llama", tie_embeddings=False), **MB4)),
    "buffers": (dict(pipeline=2), dict(model=dict(type=Buffered), **MB4)),
    "zb-h1": (dict(pipeline=2), dict(schedule=dict(type="zb-h1", microbatches=4))),
    "expert": (dict(data=2, expert=2), dict(model=MOE, **MB2)),
    "selective": (dict(tensor=2), dict(train=dict(activation_checkpoint="selective"), **MB2)),
    "frozen": (
        dict(data=2, zero=1),
        dict(optimizer=dict(groups=[dict(match="*embedding*", frozen=True)])),
    ),
}
_MICROBATCH = dict(data=2, pipeline=2, zero=3, tensor=dict(weights="microbatch"))
_ZB_H1 = dict(schedule=dict(type="zb-h1", microbatches=4))
_LAMB, _MUON = (dict(optimizer=dict(type=name, lr=1e-3, weight_decay=0.0)) for name in ("LAMB", "Muon"))
#: in several buckets
SMALL = dict(comm=dict(bucket_mb=0.05))
#: plans whose collectives of weights and gradients differ, by the number of their ranks
TRAFFIC: dict[int, dict[str, Case]] = {
    2: {
        "buckets": (dict(data=2), SMALL),
        "zero_3_microbatch": (dict(data=2, zero=3, tensor=dict(weights="microbatch")), MB2),
        "zero_3_step": (dict(data=2, zero=3, tensor=dict(weights="step")), MB2),
        "zero_3_checkpointed": (dict(data=2, zero=3), dict(train=dict(activation_checkpoint="full"))),
        "sequence_zero_3": (dict(sequence=dict(size=2, mode="ulysses"), zero=3), {}),
        "zero_1_expert": (dict(data=2, expert=2, zero=1), dict(model=MOE)),
        "frozen_zero_3": (dict(data=2, zero=3), dict(optimizer=dict(groups=[dict(match="*embedding*", frozen=True)]))),
        "lamb": (dict(data=2, zero=3), _LAMB),
    },
    4: {
        "hsdp": (dict(data=4, zero=dict(stage=3, shard=2)), MB2),
        "hierarchical": (dict(data=4, strategy=dict(type="hierarchical", hosts=2)), SMALL),
        "interleaved_zero_3": (
            dict(data=2, pipeline=2, zero=3),
            dict(model=dict(num_layers=4), schedule=dict(type="interleaved", microbatches=4, chunks=2)),
        ),
        "zb_h1_zero_3": (dict(data=2, pipeline=2, zero=3), _ZB_H1),
        "zb_h1_zero_3_microbatch": (_MICROBATCH, _ZB_H1),
        "1f1b_zero_3_microbatch": (_MICROBATCH, MB4),
        "sequence_data_zero_1": (dict(data=2, sequence=2, zero=1), MB2),
        "expert_zero_1": (dict(data=4, expert=2, zero=1), dict(model=MOE)),
        "expert_hsdp": (dict(data=4, expert=2, zero=dict(stage=1, shard=2)), dict(model=MOE)),
        "data_pipeline_tied": (dict(data=2, pipeline=2), {**MB4, **SMALL}),
        "muon_pipeline": (dict(pipeline=2, data=2), {**MB2, **_MUON}),
    },
}
#: on four
FOUR: dict[str, Case] = {
    "2d": (dict(tensor=dict(mode="2d", size=4)), MB2),
    "2d_step": (dict(tensor=dict(mode="2d", size=4, weights="step")), MB2),
    "1d_zero_3": (dict(data=2, tensor=2, zero=3), MB2),
    "pipeline_zero_1": (dict(data=2, pipeline=2, zero=1), MB4),
}


def config_of_case(case: Case) -> dict[str, Any]:
    plan, more = case
    model, train = more.get("model", {}), dict(more.get("train", {}))
    rest = {key: value for key, value in more.items() if key not in ("model", "train")}
    precision = train.pop("precision", "fp32")
    made = config_of(plan, 4, precision, model={"type": "GPT", **MODEL, **model}, train=train, **rest)
    return {**made, "data": Samples(MODEL)}
