"""Runs of equal blocks in a model: the cost of a long run follows from its first few blocks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn

from colossus.layers.checkpointing import is_checkpointed
from colossus.layers.pipeline_block import NamedBlock
from colossus.layout.parameter import spec_of

#: blocks of a run that are executed: the first may allocate what all of them share
_RUN = 2
_PLAIN = (int, float, bool, str, tuple, type(None), torch.dtype)


#: equal blocks that follow each other: those that are executed, and the others
BlockRun = tuple[list[NamedBlock], list[NamedBlock]]


def runs_of(model: nn.Module, blocks: Sequence[NamedBlock]) -> list[BlockRun]:
    """Group the blocks of a model into runs, in order."""
    modules = dict(model.named_modules(remove_duplicate=False))
    params = dict(model.named_parameters(remove_duplicate=False))
    runs = [list(group) for _, group in groupby(blocks, lambda block: _kind_of(block, modules, params))]
    return [(run[:_RUN], run[_RUN:]) for run in runs]


def _kind_of(block: NamedBlock, modules: dict[str, nn.Module], params: dict[str, nn.Parameter]) -> Hashable:
    """Return a key of a block's computation: the types, options and parameters of its modules, without their names."""
    called = getattr(block.call, "__qualname__", type(block.call).__qualname__)
    return (
        called,
        tuple(_options_of(modules[name]) for name in block.modules),
        tuple((tuple(params[name].shape), params[name].requires_grad) for name in block.parameters),
    )


def _options_of(module: nn.Module) -> Hashable:
    plain = {key: value for key, value in vars(module).items() if isinstance(value, _PLAIN) and key != "full_name"}
    options: list[tuple[str, Any]] = sorted((key, repr(value)) for key, value in plain.items())
    return type(module), tuple(options), module.extra_repr(), is_checkpointed(module)


def unused(runs: Sequence[BlockRun]) -> set[str]:
    """Return the names of parameters and buffers that only blocks that do not run use."""
    used, unused = (
        {name for run in runs for block in run[place] for name in (*block.parameters, *block.buffers)}
        for place in range(2)
    )
    return unused - used


def share_gradient_axes(model: nn.Module, runs: Sequence[BlockRun]) -> None:
    """Copy the gradient axes, which layers record in their first forward, to equal blocks that do not run."""
    params = dict(model.named_parameters(remove_duplicate=False))
    for shown, left_out in runs:
        for block in left_out:
            for name, other in zip(block.parameters, shown[-1].parameters, strict=True):
                axes = spec_of(params[other]).gradient_axes
                if axes is not None:
                    spec_of(params[name]).record(axes)
