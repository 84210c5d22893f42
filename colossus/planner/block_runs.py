"""Stages as runs of equal blocks, of which a few are enough to know what many need."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn

from colossus.layers.checkpointing import is_checkpointed
from colossus.layers.pipeline_block import NamedBlock

#: of equal blocks that follow each other, so many are run: the first may make what all of them use
_RUN = 2
_PLAIN = (int, float, bool, str, tuple, type(None), torch.dtype)


@dataclass(frozen=True)
class BlockRun:
    """Equal blocks that follow each other.

    Attributes:
        kind: equal for two runs of equal blocks, of which as many are run.
        shown: those that are run.
        left_out: the others.
    """

    kind: Hashable
    shown: Sequence[Callable[[Any], Any]]
    left_out: Sequence[NamedBlock]


def runs_of(model: nn.Module, blocks: Sequence[NamedBlock]) -> list[BlockRun]:
    """The blocks of a stage in order, as runs."""
    modules = dict(model.named_modules(remove_duplicate=False))
    params = dict(model.named_parameters(remove_duplicate=False))
    found = []
    for kind, run in groupby(blocks, lambda block: _kind_of(block, modules, params)):
        every = list(run)
        shown = [block.call for block in every[:_RUN]]
        found.append(BlockRun((kind, len(shown)), shown, every[_RUN:]))
    return found


def _kind_of(block: NamedBlock, modules: dict[str, nn.Module], params: dict[str, nn.Parameter]) -> Hashable:
    """What a block computes, as far as its modules say: their types, options and parameters, not their names."""
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
