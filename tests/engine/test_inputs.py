"""How batches enter the model: what layers are told of them, for how long, and under every stage of a pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.training import batch_of, config_of

import colossus
from colossus.layers.model_parallel import model_parallel_of
from colossus.schedule.executor import StepObserver

PADDED = dict(sequence=dict(size=2, mode="ring", pad=True))
SIZES: dict[str, Any] = dict(vocab_size=256, seq_len=6)


def _lengths_seen(rank: int, parallel: dict[str, Any]) -> list[int | None]:
    """In and after a step whose loss raises, a step, an evaluation."""
    settings = config_of(parallel, 2, "fp64", model=SIZES)
    seen: list[int | None] = []

    class Watch(StepObserver):
        def before_forward(self, stage: int, microbatch: int, samples: Any) -> None:
            seen.append(model_parallel_of(engine.context).batch_info.num_tokens)

    def bad(outputs: Any, batch: Any) -> Any:
        raise ArithmeticError("a bad batch")

    engine = colossus.initialize(settings, loss_fn=bad)
    engine.observers.append(Watch())
    with pytest.raises(ArithmeticError):
        engine.train_step(batch_of(0, {**SIZES, "seq_len": 5}))
    seen.append(model_parallel_of(engine.context).batch_info.num_tokens)
    engine.close()
    engine = colossus.initialize(settings)
    parallel_of_model = model_parallel_of(engine.context)
    engine.observers.append(Watch())
    engine.train_step(batch_of(0, SIZES))
    seen.append(parallel_of_model.batch_info.num_tokens)
    engine.eval_step(batch_of(0, {**SIZES, "seq_len": 3}))
    seen.append(parallel_of_model.batch_info.num_tokens)
    with pytest.raises(
        ValueError, match="a sequence has 8 tokens, but there are only 6 positions"
    ):  # not the last batch's 3
        engine.model(torch.zeros(2, 4, dtype=torch.long))
    engine.close()
    return seen


def test_layers_know_the_length_for_one_step_and_no_longer() -> None:
    assert run_ranks(2, _lengths_seen, PADDED, with_context=False) == [[5, None, 6, None, 3, None]] * 2
