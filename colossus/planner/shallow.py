"""A model of many equal layers by one of two: what is known of its last layer is known of all that follow."""

from __future__ import annotations

import re
from dataclasses import replace

from colossus.config import Config, model_options
from colossus.models.options import TransformerOptions
from colossus.planner.parameter_facts import ModelFacts, ParameterFacts
from colossus.registry import TORCH_OPTIMIZERS

_LAYERS = 2


def shallow(config: Config) -> tuple[Config, int]:
    """The config with as few layers as tell of all, and the number of those that it lacks.

    A model stays as it is whose layers differ, or are not the same to the optimizer or to activation checkpointing.
    """
    options, optimizer, again = model_options(config), config.optimizer, config.train.activation_checkpoint
    if not isinstance(options, TransformerOptions) or options.num_layers <= _LAYERS or config.model is None:
        return config, 0
    first = options.block_options(0)
    are_equal = all(options.block_options(layer) == first for layer in range(1, options.num_layers))
    by_element = optimizer.type in TORCH_OPTIMIZERS and not optimizer.whole
    is_plain = not optimizer.groups and optimizer.layer_decay is None and again.every == 1 and again.modules is None
    if not (are_equal and by_element and is_plain):
        return config, 0
    model = config.model.model_copy(update={"num_layers": _LAYERS})
    return config.model_copy(update={"model": model}), options.num_layers - _LAYERS


def with_more_layers(facts: ModelFacts, more: int) -> ModelFacts:
    """The facts of a model that has so many more layers like the last one, which is the last block but one."""
    at = len(facts.blocks) - 2
    stem, _, number = facts.blocks[at].rpartition(".")
    unit = facts.units[at]

    def place(block: int) -> int:
        return block if block <= at else block + more

    def unit_place(one: int) -> int:
        return one if unit is None or one <= unit else one + more

    def copy(one: ParameterFacts, times: int) -> ParameterFacts:
        name = re.sub(rf"(^|\.){re.escape(stem)}\.{number}\.", rf"\g<1>{stem}.{int(number) + times}.", one.name)
        units = tuple(each if each != unit else each + times for each in one.units)
        return ParameterFacts(name, one.kind, (at + times,), units, one.spec)

    parameters: list[ParameterFacts] = []
    layer = [one for one in facts.parameters if one.blocks == (at,)]
    for one in facts.parameters:
        blocks, units = tuple(map(place, one.blocks)), tuple(map(unit_place, one.units))
        parameters.append(replace(one, blocks=blocks, units=units))
        if layer and one is layer[-1]:
            parameters += [copy(each, times) for times in range(1, more + 1) for each in layer]
    names = [f"{stem}.{int(number) + times}" for times in range(1, more + 1)]
    return replace(
        facts,
        parameters=tuple(parameters),
        blocks=(*facts.blocks[: at + 1], *names, *facts.blocks[at + 1 :]),
        units=_with_more_units(facts, at, more),
        num_units=facts.num_units + (0 if unit is None else more),
        buffers=_with_more_buffers(facts, at, more),
        routers=(*facts.routers, *facts.routers[-1:] * more),
    )


def _with_more_units(facts: ModelFacts, at: int, more: int) -> tuple[int | None, ...]:
    unit = facts.units[at]
    behind = [each if each is None or unit is None else each + more for each in facts.units[at + 1 :]]
    copies = [None if unit is None else unit + times for times in range(1, more + 1)]
    return (*facts.units[: at + 1], *copies, *behind)


def _with_more_buffers(facts: ModelFacts, at: int, more: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    found = [
        (size, tuple(block if block <= at else block + more for block in blocks)) for size, blocks in facts.buffers
    ]
    copies = [
        (size, (at + times,)) for size, blocks in facts.buffers if blocks == (at,) for times in range(1, more + 1)
    ]
    return (*found, *copies)
