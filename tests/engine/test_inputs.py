"""How batches enter the model: what layers are told of them, for how long, and under every stage of a pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.training import batch_of, config_of

import colossus
from colossus.comm import collectives
from colossus.layers.model_parallel import model_parallel_of
from colossus.nest import tensors
from colossus.schedule.executor import StepObserver

PADDED = dict(sequence=dict(size=2, mode="ring", pad=True))
SIZES: dict[str, Any] = dict(vocab_size=256, seq_len=6)


def _lengths_seen(rank: int, parallel: dict[str, Any]) -> list[int | None]:
    """Return lengths in and after a step whose loss raises, a step, an evaluation; check the padding of a batch."""
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
    documents = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 2, 2, 2]])
    local = engine.inputs.local({"inputs": {"ids": documents + 5, "documents": documents}, "labels": documents + 7})
    wholes = [collectives.all_gather(x, engine.context.group("sequence"), dim=1).wait() for _, x in tensors(local)]
    # the shards of two ranks have tokens 0, 1, 6, 7 and 2, 3, 4, 5
    (ids, numbers, labels), at = [whole[:, [0, 1, 4, 5, 6, 7, 2, 3]] for whole in wholes], slice(5, None)
    assert ids[:, at].eq(0).all()
    assert labels[:, at].eq(-100).all()
    assert numbers.tolist() == [[0, 0, 1, 1, 1, 2, 2, 2], [0, 1, 2, 2, 2, 3, 3, 3]]
    engine.close()
    return seen


def test_layers_know_the_length_for_one_step_and_padding_is_a_document() -> None:
    assert run_ranks(2, _lengths_seen, PADDED, with_context=False) == [[5, None, 6, None, 3, None]] * 2
