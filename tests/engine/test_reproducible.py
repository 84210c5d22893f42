"""``train.reproducible = "plan"``: the same bits of losses, norms, gradients and weights under every plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.ranks import RankError, run_ranks
from helpers.training import Trace, batch_of, config_of, run_cases, run_plan, scheduled
from torch import nn

import colossus
from colossus.config import ConfigError, load_config

SIZES: dict[str, Any] = dict(num_layers=2, hidden_size=32, num_heads=4, vocab_size=64, seq_len=16)
GPT: dict[str, Any] = dict(type="GPT", **SIZES, dropout=0.1, attention_dropout=0.1)
LLAMA: dict[str, Any] = dict(type="Llama", **SIZES | dict(num_kv_heads=4), activation_checkpoint="full")


def config(plan: dict[str, Any], model: dict[str, Any], precision: str, steps: int, **more: Any) -> dict[str, Any]:
    settings = config_of(plan, steps, precision, **more)
    settings["train"]["reproducible"] = "plan"
    return settings | {"model": model}


def assert_same_bits(trace: Trace, reference: Trace) -> None:
    assert trace.losses == reference.losses
    assert trace.norms == reference.norms
    for mine, other in zip((*trace.gradients, trace.end), (*reference.gradients, reference.end), strict=True):
        assert mine.keys() == other.keys()
        assert [name for name, value in other.items() if not torch.equal(mine[name], value)] == []


def test_four_ranks_compute_the_bits_of_one() -> None:
    plans: dict[str, Any] = {
        "zero": dict(data=2, tensor=2, zero=3),
        "tensor": dict(tensor=4),
        "pipeline": dict(pipeline=2, tensor=2),
    }
    (reference,) = run_plan(1, config({}, GPT, "fp32", 2), 2)
    for name, traces in run_cases(4, {name: config(plan, GPT, "fp32", 2) for name, plan in plans.items()}, 2).items():
        try:
            assert_same_bits(traces[0], reference)
        except AssertionError as error:
            error.add_note(f"under the plan {name!r}")
            raise


PLANS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "data 2": (2, dict(data=2), {}),
    "data 8": (8, dict(data=8), {}),
    "tensor 2": (2, dict(tensor=2), {}),
    "tensor 4": (4, dict(tensor=4), {}),
    "pipeline 2": (2, dict(pipeline=2), {}),
    "pipeline 2, zero bubbles": (2, dict(pipeline=2), scheduled("zb-h1", 8)),
    "ZeRO 1": (4, dict(data=4, zero=1), {}),
    "ZeRO 3": (2, dict(data=2, zero=3), {}),
    "hosts": (4, dict(data=4, strategy=dict(type="hierarchical", per_host=2)), {}),
    "data 2 x pipeline 2 x tensor 2, ZeRO 2": (8, dict(data=2, pipeline=2, tensor=2, zero=2), {}),
}


@pytest.mark.long
@pytest.mark.parametrize(("model", "precision"), [(GPT, "fp32"), (GPT, "bf16"), (LLAMA, "fp32"), (LLAMA, "bf16")])
def test_ten_plans_over_twenty_steps(model: dict[str, Any], precision: str) -> None:
    (reference,) = run_plan(1, config({}, model, precision, 20), 20)
    assert reference.losses[-1] != reference.losses[0]
    for world, plan, more in PLANS.values():
        assert_same_bits(run_plan(world, config(plan, model, precision, 20, **more), 20)[0], reference)


@pytest.mark.long
def test_a_run_that_is_resumed_under_other_plans(tmp_path: Any) -> None:
    def train(rank: int, plan: dict[str, Any], first: int, last: int) -> list[float]:
        settings = config(plan, GPT, "bf16", 9, checkpoint=dict(dir=str(tmp_path), every=3, resume="auto"))
        engine = colossus.initialize(settings)
        engine.checkpoints.resume()
        assert engine.completed_steps == first
        part = 8 // engine.context.size("data")
        begin = engine.context.index("data") * part
        losses = []
        for step in range(first, last):
            batch = {key: value[begin : begin + part] for key, value in batch_of(step, SIZES, 8).items()}
            losses.append(engine.train_step(batch).loss)
        engine.checkpoints.save()
        engine.close()
        return losses

    losses: list[float] = []
    for world, plan, first in ((2, dict(data=2, zero=3), 0), (4, dict(tensor=4), 3), (2, dict(pipeline=2), 6)):
        losses += run_ranks(world, train, plan, first, first + 3, with_context=False)[0]
    assert losses == run_plan(1, config({}, GPT, "bf16", 9), 9)[0].losses


class WithTorchsDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 33), nn.Dropout(0.5), nn.GELU(), nn.Linear(33, 5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs.float().sin())

    def loss(self, outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return outputs.square().sum(), len(outputs)


def test_a_model_in_plain_torch_over_data() -> None:
    def train(rank: int, plan: dict[str, Any]) -> list[float]:
        settings = config(plan, GPT, "fp32", 3)
        del settings["model"]
        engine = colossus.initialize(settings, WithTorchsDropout)
        part = 8 // engine.context.size("data")
        begin = engine.context.index("data") * part
        sizes = SIZES | dict(seq_len=64)
        losses = [
            engine.train_step({"inputs": batch_of(step, sizes, 8)["inputs"][begin : begin + part]}).loss
            for step in range(3)
        ]
        losses.append(engine.eval_step({"inputs": batch_of(3, sizes, 8)["inputs"][begin : begin + part]}).loss)
        engine.close()
        return losses

    alone = run_ranks(1, train, {}, with_context=False)[0]
    assert run_ranks(2, train, dict(data=2, zero=3), with_context=False)[0] == alone
    assert len(set(alone)) == 4


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            dict(parallel=dict(tensor=dict(size=4, mode="2d"))),
            "parallel.tensor.mode = '2d', which splits samples",
        ),
        (dict(parallel=dict(sequence=2)), "parallel.sequence = 2, which splits the sums over a sample's tokens"),
        (dict(parallel=dict(data=2, strategy="sgp")), "parallel.strategy = 'sgp': set one of all_reduce"),
        (dict(train=dict(precision="fp16")), "train.precision = fp16"),
        (dict(model=dict(loss_chunk=8)), "model.loss_chunk = 8, which adds up in another order"),
    ],
)
def test_what_is_refused(sections: dict[str, Any], message: str) -> None:
    settings = config_of({}, 2, "fp32", **sections)
    settings["train"]["reproducible"] = "plan"
    with pytest.raises(ConfigError, match="train.reproducible = 'plan' does not support " + message):
        load_config(settings)


def test_sizes_whose_tiles_do_not_divide_are_refused() -> None:
    settings = config(dict(tensor=2), GPT | dict(vocab_size=53), "fp32", 1)
    with pytest.raises(RankError, match="a vocabulary of size 53 over 2 tensor ranks"):
        run_plan(2, settings, 1)
