"""Equal blocks: the cost of many follows from two of them.

A recording runs the first blocks of each run of equal ones. A transformer whose layers are all equal is even built with
two layers.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import nn

from colossus.config import Config, model_options
from colossus.layers.checkpointing import is_checkpointed
from colossus.layers.pipeline_block import NamedBlock
from colossus.layout.parameter import spec_of
from colossus.models.options import TransformerOptions
from colossus.planner.parameter_facts import ModelFacts, ParameterFacts
from colossus.registry import TORCH_OPTIMIZERS

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


# -- transformers of equal layers ------------------------------------------------------------------------------


def shallow(config: Config) -> tuple[Config, int]:
    """Return the config with two layers, and the number of layers left out.

    The config is returned as it is, with 0, if layers differ by themselves, for the optimizer or for checkpointing.
    """
    options, optimizer, checkpointing = model_options(config), config.optimizer, config.train.activation_checkpoint
    if not isinstance(options, TransformerOptions) or options.num_layers <= _RUN or config.model is None:
        return config, 0
    if getattr(options, "reference", None) is not None:  # whose blocks are others
        return config, 0
    first = options.block_options(0)
    are_equal = all(options.block_options(layer) == first for layer in range(1, options.num_layers))
    by_element = optimizer.type in TORCH_OPTIMIZERS and not optimizer.whole
    is_plain = (
        not optimizer.groups
        and optimizer.layer_decay is None
        and checkpointing.every == 1
        and checkpointing.modules is None
    )
    if not (are_equal and by_element and is_plain):
        return config, 0
    model = config.model.model_copy(update={"num_layers": _RUN})
    return config.model_copy(update={"model": model}), options.num_layers - _RUN


def with_more_layers(facts: ModelFacts, more: int) -> ModelFacts:
    """Return the facts of a model with ``more`` further layers like its last layer, which is the last block but one."""
    at = len(facts.blocks) - 2
    unit = facts.units[at]
    assert unit is not None  # a layer is one module
    stem, _, number = facts.blocks[at].rpartition(".")
    first = int(number)

    def moved(numbers: Sequence[int], last: int, by: int) -> tuple[int, ...]:
        """Return numbers of blocks or units: the last layer's moves by ``by``, those behind it make room for all."""
        return tuple(own + (by if own == last else more if own > last else 0) for own in numbers)

    def copy(param: ParameterFacts, by: int) -> ParameterFacts:
        name = re.sub(rf"(^|\.){re.escape(stem)}\.{first}\.", rf"\g<1>{stem}.{first + by}.", param.name)
        return replace(param, name=name, blocks=moved(param.blocks, at, by), units=moved(param.units, unit, by))

    of_layer = [place for place, param in enumerate(facts.parameters) if param.blocks == (at,)]
    behind, copies = of_layer[-1] + 1, range(1, more + 1)
    parameters = [copy(param, 0) for param in facts.parameters]
    parameters[behind:behind] = [copy(facts.parameters[place], by) for by in copies for place in of_layer]
    buffers = [(size, moved(blocks, at, 0)) for size, blocks in facts.buffers]
    buffers += [(size, moved(blocks, at, by)) for size, blocks in facts.buffers if blocks == (at,) for by in copies]
    return replace(
        facts,
        parameters=tuple(parameters),
        blocks=(*facts.blocks[:at], *(f"{stem}.{first + by}" for by in range(more + 1)), *facts.blocks[at + 1 :]),
        units=(
            *facts.units[:at],
            *range(unit, unit + more + 1),
            *(None if own is None else own + more for own in facts.units[at + 1 :]),
        ),
        num_units=facts.num_units + more,
        buffers=tuple(buffers),
        routers=(*facts.routers, *facts.routers[-1:] * more),
    )
