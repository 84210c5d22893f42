"""Runs of equal blocks in a stage: the cost of a long run follows from its first few blocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn

from colossus.layers.checkpointing import is_checkpointed
from colossus.layers.pipeline_block import NamedBlock

#: blocks of a run that are executed: the first may allocate what all of them share
_RUN = 2
_PLAIN = (int, float, bool, str, tuple, type(None), torch.dtype)


@dataclass(frozen=True)
class BlockRun:
    """Equal blocks that follow each other.

    Attributes:
        kind: key of the run; runs with equal keys have equal blocks, and as many in ``shown``.
        shown: the blocks that are executed.
        left_out: the other blocks.
    """

    kind: Hashable
    shown: Sequence[Callable[[Any], Any]]
    left_out: Sequence[NamedBlock]


def runs_of(model: nn.Module, blocks: Sequence[NamedBlock]) -> list[BlockRun]:
    """Group the blocks of a stage into runs, in order."""
    modules = dict(model.named_modules(remove_duplicate=False))
    params = dict(model.named_parameters(remove_duplicate=False))
    runs = []
    for kind, group in groupby(blocks, lambda block: _kind_of(block, modules, params)):
        members = list(group)
        shown = [block.call for block in members[:_RUN]]
        runs.append(BlockRun((kind, len(shown)), shown, members[_RUN:]))
    return runs


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
