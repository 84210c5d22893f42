"""A frozen model beside the one that trains: both run block by block, in one chain, under any plan.

A pipeline stage has the blocks of both, and passes both activations on. The reference gets no gradient, keeps nothing
for a backward, and is in no checkpoint: its weights come from where they came from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from colossus.layers.model_parallel import ModelParallel
from colossus.layers.pipeline_block import PipelineBlock, run_blocks
from colossus.layout.parameter import record_full_order
from colossus.models.tuning_options import ReferenceOptions, options_of_reference
from colossus.registry import MODEL_SOURCES, MODELS


class Both(NamedTuple):
    """A value of the model, and that of its reference: activations between blocks, or logits."""

    own: Any
    reference: Any


def make_reference(model: Any, wanted: ReferenceOptions) -> Any:
    """Return the reference of a decoder, frozen; None if it is the decoder itself without adapters."""
    if wanted.adapters_off:
        return None
    options = options_of_reference(model.options)
    build: Callable[..., Any] = type(model)
    if wanted.path is not None:
        spec, *_ = MODEL_SOURCES.get("hf")({"path": wanted.path})
        kind = MODELS.get(spec.pop("type"))
        build, options = kind, {**spec, "loss_chunk": model.options.loss_chunk}
    reference: Any = build(**options)
    if getattr(reference.options, "experts", None) is not None:
        raise ValueError("reference: a model with experts cannot be one, since its routers count the tokens of a step")
    if reference.options.vocab_size != model.options.vocab_size:
        raise ValueError(
            f"the reference has a vocabulary of {reference.options.vocab_size}, the model one of "
            f"{model.options.vocab_size}: they are compared word by word, so both need the same tokenizer"
        )
    if not reference.options.is_rotary and reference.options.seq_len < model.options.seq_len:
        raise ValueError(
            f"the reference has learnt {reference.options.seq_len} positions, fewer than the model's seq_len = "
            f"{model.options.seq_len}: it cannot read the same texts"
        )
    reference.is_reference = True
    record_full_order(reference)
    return reference.requires_grad_(False).eval()


def chain_of_both(
    own: Sequence[PipelineBlock], other: Sequence[PipelineBlock], parallel: ModelParallel, *, is_shared: bool
) -> list[PipelineBlock]:
    """Return the chain of two models: embedding, blocks and head of both; the blocks of the other are spread evenly.

    Outside of steps and evaluations (in generation, say) the first model runs alone.

    Args:
        own: the chain of the model that trains.
        other: the chain of its reference.
        parallel: of both.
        is_shared: whether the reference is the model itself without its adapters.
    """
    layers, count = len(own) - 2, len(other) - 2
    bounds = [0, *(1 + number * count // layers for number in range(layers + 1)), count + 2]
    chain = []
    for number, block in enumerate(own):
        part = other[bounds[number] : bounds[number + 1]]
        call = _Beside(block, part, parallel, is_first=number == 0, is_shared=is_shared)
        owned = [] if is_shared else [item for frozen in part for item in frozen.owns]
        units = [item for item in (*block.owns, *owned) if isinstance(item, nn.Module)] if 0 < number <= layers else []
        chain.append(PipelineBlock(call, *block.owns, *owned, name=block.name, units=units))
    return chain


class _Beside:
    """A block of the model, and those of its reference beside it."""

    def __init__(
        self,
        own: PipelineBlock,
        other: Sequence[PipelineBlock],
        parallel: ModelParallel,
        *,
        is_first: bool,
        is_shared: bool,
    ) -> None:
        self._own, self._other, self._parallel = own, other, parallel
        self._is_first, self._is_shared = is_first, is_shared

    def __call__(self, value: Any) -> Any:
        if self._is_first and self._parallel.batch_info.microbatch_size:
            value = Both(value, value)
        if not isinstance(value, Both):
            return self._own(value)
        own = self._own(value.own)
        with torch.no_grad(), _without_adapters(self._parallel, self._is_shared):
            return Both(own, run_blocks(self._other, value.reference))


@contextmanager
def _without_adapters(parallel: ModelParallel, is_wanted: bool) -> Iterator[None]:
    parallel.adapters_off = is_wanted
    try:
        yield
    finally:
        parallel.adapters_off = False
