"""Sequences split over ranks: the same training run, alone and with every other parallelism."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from helpers.laws import assert_parity
from helpers.long import but, long
from helpers.ranks import RankError, run_ranks
from helpers.training import Trace, config_of, run_plan
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.config import ConfigError, load_config

STEPS, TOKENS = 2, 16


def config(parallel: dict[str, Any], steps: int = STEPS, precision: str = "fp64", **more: Any) -> dict[str, Any]:
    model = {"seq_len": TOKENS, **more.pop("model", {})}
    return config_of(parallel, steps, precision, model=model, **more)


@cache
def alone(steps: int = STEPS, precision: str = "fp64", **model: Any) -> Trace:
    return run_plan(1, config({}, steps, precision, model=model), steps)[0]


def ring(size: int) -> dict[str, Any]:
    return dict(size=size, mode="ring")


def ulysses(size: int) -> dict[str, Any]:
    return dict(size=size, mode="ulysses")


#: beside the products of rings and Ulysses of two ranks, which tests/test_parity.py has with all else
PLANS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "ulysses 4": (4, dict(sequence=ulysses(4)), {}),
    "ring 4": (4, dict(sequence=ring(4)), {}),
    "hybrid 4": (4, dict(sequence=dict(size=4, mode="hybrid")), {}),
    "hybrid 8": (8, dict(sequence=dict(size=8, mode="hybrid", ulysses=4)), {}),
    "chosen": (4, dict(sequence=4), {}),
    "2d": (8, dict(sequence=ring(2), tensor=dict(mode="2d", size=4)), {}),
    "2d step": (
        8,
        dict(sequence=ulysses(2), tensor=dict(mode="2d", size=4, weights="step")),
        dict(schedule=dict(microbatches=2)),
    ),
    "3d": (8, dict(sequence=ring(2), tensor=dict(mode="3d", shape=(2, 1, 2))), {}),
}


@pytest.mark.parametrize("name", but(PLANS.keys() - {"ulysses 4"}, PLANS))
def test_every_plan_follows_the_one_process_run(name: str) -> None:
    world, parallel, more = PLANS[name]
    assert_parity(run_plan(world, config(parallel, **more), STEPS), alone(), "fp64")


@pytest.mark.parametrize("name", ["hybrid 4", *long("ring 4", "ulysses 4")])
def test_windows(name: str) -> None:
    world, parallel, more = PLANS[name]
    model = dict(positions="rotary", window=5, attention_pattern=("local", "global"))
    assert_parity(run_plan(world, config(parallel, model=model, **more), STEPS), alone(**model), "fp64")


PADDED = {
    "pipeline": (4, dict(sequence=ring(2), pipeline=2), dict(schedule=dict(type="1f1b", microbatches=2))),
    "1d": (4, dict(sequence=ring(2), tensor=2), {}),
    **{name: PLANS[name] for name in ("ring 4", "2d", "ulysses 4", "hybrid 4")},
}


@pytest.mark.parametrize("name", but(PADDED.keys() - {"pipeline"}, PADDED))
def test_lengths_that_do_not_divide_are_padded(name: str) -> None:
    world, parallel, more = PADDED[name]
    parallel = {**parallel, "sequence": {**parallel["sequence"], "pad": True}}
    traces = run_plan(world, config(parallel, model=dict(seq_len=13), **more), STEPS)
    assert_parity(traces, alone(seq_len=13), "fp64")


# -- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parallel", "model", "words"),
    [
        (dict(sequence=ring(4)), dict(seq_len=12), "model.seq_len = 12 is not a multiple of 8, into which"),
        (dict(sequence=ulysses(4)), dict(num_heads=2, seq_len=16), "model.num_heads = 2 is not a multiple of 4"),
        (
            dict(sequence=ulysses(2), tensor=2),
            dict(num_kv_heads=2, seq_len=16),
            "model.num_kv_heads = 2 is not a multiple of 4, the ranks of parallel.tensor and mode ulysses that get",
        ),
        (dict(sequence=dict(size=6, mode="hybrid", ulysses=4)), {}, "parallel.sequence.ulysses = 4 does not divide"),
        (dict(sequence=dict(size=4, ulysses=2)), {}, "parallel.sequence.ulysses = 2 has no effect in mode"),
        (dict(sequence=dict(size=4, mode="rings")), {}, "no sequence mode named 'rings'. Did you mean 'ring'?"),
        (
            dict(sequence=2),
            dict(attention_dropout=0.1),
            "model.attention_dropout = 0.1: parallel.sequence supports none",
        ),
    ],
)
def test_refused_before_launch(parallel: dict[str, Any], model: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("(", r"\(").replace(".", r"\.")):
        load_config(config(parallel, model={"seq_len": TOKENS, **model}))


def test_a_bare_number_takes_what_sends_less() -> None:
    chosen = {
        heads: load_config(config(dict(sequence=4), model=heads_of(heads))).parallel.sequence.mode
        for heads in ((4, 4), (8, 4), (4, 2), (2, 2))
    }
    assert chosen == {(4, 4): "ulysses", (8, 4): "ulysses", (4, 2): "ring", (2, 2): "ring"}


def heads_of(heads: tuple[int, int]) -> dict[str, Any]:
    return dict(num_heads=heads[0], num_kv_heads=heads[1], hidden_size=32)


def _build(rank: int, what: str) -> None:
    settings = dict(parallel=dict(sequence=2), train=dict(global_batch_size=4), device="cpu")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = layers.Attention(8, 2, dropout=0.5 if what == "dropout" else 0.0)

        def forward(self, x: Tensor) -> Tensor:
            if what == "mask":
                tokens = x.shape[1] * 2
                return self.attention(x, torch.ones(tokens, tokens, dtype=torch.bool))
            if what == "whole":
                return self.attention(x) + self.attention(torch.zeros(4, 8, 8)).mean(1, keepdim=True)
            return self.attention(x)

    def loss(y: Tensor, batch: Any) -> tuple[Tensor, int]:
        return y.square().sum(), y.numel()

    engine = colossus.initialize(settings, model=Net, loss_fn=loss)
    engine.train_step(torch.randn(*((4,) if what == "flat" else (4, 7) if what == "odd" else (4, 8, 8))))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (
            "mask",
            r"attention \(Attention\): a mask over whole sequences, but parallel.sequence splits them over 2",
        ),
        (
            "whole",
            r"attention \(Attention\): its input has 8 tokens on each of 2 ranks, but the sequences of this batch",
        ),
        ("dropout", r"attention weights cannot have dropout under parallel.sequence"),
        ("flat", "no tensor of it has two dims"),
        ("odd", "7 tokens"),
    ],
)
def test_refused_in_words(what: str, words: str) -> None:
    with pytest.raises(RankError, match=words):
        run_ranks(2, _build, what, with_context=False, timeout=30)
