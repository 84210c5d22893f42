"""Objectives of a model beside a frozen reference: every plan follows one process, and that plain torch."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.laws import assert_parity
from helpers.training import Trace, assert_is_plain_torch, batch_of, config_of, run_cases, scheduled
from helpers.twins import PlainGPT
from torch import Tensor

from colossus.models import objectives
from colossus.models.tuning_options import DPOOptions

STEPS, BATCH = 3, 24
SIZES: dict[str, Any] = dict(num_layers=2, hidden_size=24, num_heads=12, vocab_size=53, seq_len=16)
#: another model, whose blocks are spread over those of the model
TEACHER: dict[str, Any] = dict(num_layers=3, hidden_size=48, num_heads=12)
MODELS: dict[str, dict[str, Any]] = {
    "dpo": dict(SIZES, objective=dict(type="dpo", beta=0.3, label_smoothing=0.1), reference=dict()),
    "ipo in chunks": dict(
        SIZES, loss_chunk=24, objective=dict(type="dpo", kind="ipo", beta=0.4), reference=dict(model=TEACHER)
    ),
    "distillation": dict(
        SIZES, tie_embeddings=False, reference=dict(model=TEACHER),
        objective=dict(type="distillation", temperature=2.0, top_k=7, label_weight=0.2),
    ),
    "reverse in chunks": dict(
        SIZES, loss_chunk=9, reference=dict(model=TEACHER), objective=dict(type="distillation", reverse=True)
    ),
    "grpo": dict(
        SIZES, loss_chunk=24, reference=dict(model=TEACHER), objective=dict(type="grpo", kl_weight=0.1, clip_high=0.3)
    ),
}  # fmt: skip


PLANS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "data 2": (2, dict(data=2), scheduled("1f1b", 2)),
    "1d 2": (2, dict(tensor=2), {}),
    "pipeline 2": (2, dict(pipeline=2), scheduled("1f1b")),
    "sequence 2": (2, dict(sequence=2), {}),
    "zero 3": (2, dict(data=2, zero=3), {}),
    "data 4": (4, dict(data=4), {}),
    "2d": (4, dict(tensor=dict(mode="2d", size=4)), {}),
    "3d 2x1x2": (4, dict(tensor=dict(mode="3d", shape=(2, 1, 2))), {}),
    "zb-v x 1d": (4, dict(pipeline=2, tensor=dict(size=2, sequence_sharded=True)), scheduled("zb-v")),
    "zero 3 x pipeline": (4, dict(data=2, pipeline=2, zero=3), scheduled("zb-h1", 2)),
    "sequence x 1d": (4, dict(sequence=2, tensor=2), {}),
    "pipeline x 2d": (8, dict(pipeline=2, tensor=dict(mode="2d", size=4)), scheduled("1f1b", 2)),
    "data x pipeline x 1d": (8, dict(data=2, pipeline=2, tensor=2), scheduled("1f1b", 2)),
}


def tuned(step: int, sizes: dict[str, Any], batch: int) -> dict[str, Tensor]:
    """`batch_of` with all that an objective may take."""
    tokens, generator = batch_of(step, sizes, batch), torch.Generator().manual_seed(step)
    shape = tokens["labels"].shape
    weights = torch.rand(shape, generator=generator, dtype=torch.float64)
    gain = torch.randn(batch, generator=generator, dtype=torch.float64)
    old = -4.0 + 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
    return {**tokens, "token_weights": weights, "advantages": gain, "old_log_probs": old}


class Twin(PlainGPT):
    """The model and its reference in plain torch, with the losses by their definitions."""

    def __init__(self, **sizes: Any) -> None:
        self.wanted, other = sizes.pop("objective"), sizes.pop("reference")
        sizes.pop("loss_chunk", None)
        super().__init__(**sizes)
        plain = PlainGPT(**{**sizes, **other.get("model", {})})
        object.__setattr__(self, "other", plain)  # no part of the model

    def loss_sum(
        self, ids: Tensor, labels: Tensor, weights: Tensor, gain: Tensor, old: Tensor
    ) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        own, valid = self(ids), labels != -100
        with torch.no_grad():
            other = self.other(ids)
        wanted = dict(self.wanted)
        kind = wanted.pop("type")
        if kind == "distillation":
            return self.distillation(own, other, labels, weights * valid, **wanted)
        own, other = (
            logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0] * valid for logits in (own, other)
        )
        if kind == "grpo":
            return self.grpo(own, other, weights * valid, gain[:, None], old, **wanted)
        ratios = (own - other).sum(1)
        margins, beta = ratios[0::2] - ratios[1::2], wanted["beta"]
        counted = valid[0::2].any(1) | valid[1::2].any(1)
        if wanted.get("kind") == "ipo":
            losses = (margins - 0.5 / beta) ** 2
        else:
            losses = -0.9 * F.logsigmoid(beta * margins) - 0.1 * F.logsigmoid(-beta * margins)
        return (losses * counted).sum(), counted.sum()

    def grpo(
        self, own: Tensor, other: Tensor, weights: Tensor, gain: Tensor, old: Tensor, kl_weight: float, clip_high: float
    ) -> tuple[Tensor, Tensor]:
        ratio = (own - old).exp()
        low, high = ratio.clamp(min=0.8) * gain, ratio.clamp(max=1 + clip_high) * gain
        losses = torch.where(gain > 0, -high, -low) + kl_weight * ((other - own).exp() - (other - own) - 1)
        return (losses * weights).sum(), weights.sum()

    def distillation(
        self,
        own: Tensor,
        other: Tensor,
        labels: Tensor,
        weights: Tensor,
        temperature: float = 1.0,
        top_k: int | None = None,
        label_weight: float = 0.0,
        reverse: bool = False,
    ) -> tuple[Tensor, Tensor]:
        q = (own / temperature).log_softmax(-1)
        if top_k is not None:
            other = torch.full_like(other, -1e9).scatter(-1, *other.topk(top_k)[::-1])
        p = (other / temperature).log_softmax(-1)
        losses = (q.exp() * (q - p) if reverse else p.exp() * (p - q)).sum(-1) * temperature**2
        label_log_probs = own.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return ((losses * (1 - label_weight) - label_weight * label_log_probs) * weights).sum(), weights.sum()


def settings(model: str, parallel: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    sizes = dict(MODELS[model], type="GPT")
    return config_of(parallel, STEPS, "fp64", model=sizes, train=dict(global_batch_size=BATCH), **more)


@cache
def alone(model: str) -> Trace:
    return run_cases(1, {model: settings(model, {}, {})}, STEPS, tuned)[model][0]


DEFAULT = [("dpo", 2), ("grpo", 2)]
CASES = [(model, world) for world in (2, 4, 8) for model in MODELS]


@pytest.mark.parametrize(
    ("model", "world"), [pytest.param(*case, marks=() if case in DEFAULT else pytest.mark.long) for case in CASES]
)
def test_every_plan_follows_one_process(model: str, world: int) -> None:
    configs = {name: settings(model, *rest) for name, (ranks, *rest) in PLANS.items() if ranks == world}
    for name, traces in run_cases(world, configs, STEPS, tuned).items():
        assert_parity(traces, alone(model), "fp64", name)


def test_an_evaluation_computes_the_margins_of_its_pairs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Tensor] = []
    margins_of = objectives.dpo_margins
    monkeypatch.setattr(objectives, "dpo_margins", lambda *inputs: (calls.append(inputs[2]), margins_of(*inputs))[1])
    loss, metrics = objectives.loss_of_objective(DPOOptions(type="dpo", beta=0.3))
    own, other, labels = torch.randn(4, 3, 5), torch.randn(4, 3, 5), torch.randint(5, (4, 3))
    with torch.no_grad():
        for swapped in (labels, labels.flip(0)):
            (total, count), (margin, _), (right, _) = (
                function(objectives.Both(own, other), {"labels": swapped}) for function in (loss, *metrics.values())
            )
            margins, _ = margins_of(own, other, swapped)
            assert (count, right) == (2, (margins > 0).sum())
            torch.testing.assert_close(margin, 0.3 * margins.sum())
            torch.testing.assert_close(total, -F.logsigmoid(0.3 * margins).sum())
    assert len(calls) == 2


@pytest.mark.parametrize("model", MODELS)
def test_one_process_is_plain_torch(model: str) -> None:
    """The reference has the values with which the model, or one of its sizes, begins."""
    sizes = MODELS[model]
    twin, trace = Twin(**sizes).double(), alone(model)
    twin.other.double()
    other = {**SIZES, **{key: value for key, value in sizes.items() if key == "tie_embeddings"}}
    config = config_of({}, 1, "fp64", model=dict(other, type="GPT", **sizes["reference"].get("model", {})))
    twin.other.load_state_dict(run_cases(1, {"reference": config}, 0)["reference"][0].start)
    assert_is_plain_torch(trace, twin, sizes, STEPS, BATCH, tuned)
    assert not [name for name in trace.end if name.startswith("reference")]
