"""Models of many equal layers are profiled with two: all further layers cost the same as the second."""

from __future__ import annotations

import re
from dataclasses import replace

from colossus.config import Config, model_options
from colossus.models.options import TransformerOptions
from colossus.planner.parameter_facts import ModelFacts, ParameterFacts
from colossus.registry import TORCH_OPTIMIZERS

_LAYERS = 2


def shallow(config: Config) -> tuple[Config, int]:
    """Return the config with two layers, and the number of layers left out.

    The config is returned as it is, with 0, if layers differ by themselves, for the optimizer or for checkpointing.
    """
    options, optimizer, checkpointing = model_options(config), config.optimizer, config.train.activation_checkpoint
    if not isinstance(options, TransformerOptions) or options.num_layers <= _LAYERS or config.model is None:
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
    model = config.model.model_copy(update={"num_layers": _LAYERS})
    return config.model_copy(update={"model": model}), options.num_layers - _LAYERS


def with_more_layers(facts: ModelFacts, more: int) -> ModelFacts:
    """Return the facts of a model with ``more`` further layers like its last layer, which is the last block but one."""
    at = len(facts.blocks) - 2
    stem, _, number = facts.blocks[at].rpartition(".")
    unit = facts.units[at]

    def place(block: int) -> int:
        return block if block <= at else block + more

    def unit_place(number: int) -> int:
        return number if unit is None or number <= unit else number + more

    def copy(param: ParameterFacts, times: int) -> ParameterFacts:
        name = re.sub(rf"(^|\.){re.escape(stem)}\.{number}\.", rf"\g<1>{stem}.{int(number) + times}.", param.name)
        units = tuple(own if own != unit else own + times for own in param.units)
        return ParameterFacts(name, param.kind, (at + times,), units, param.spec)

    parameters: list[ParameterFacts] = []
    layer = [param for param in facts.parameters if param.blocks == (at,)]
    for param in facts.parameters:
        blocks, units = tuple(map(place, param.blocks)), tuple(map(unit_place, param.units))
        parameters.append(replace(param, blocks=blocks, units=units))
        if layer and param is layer[-1]:
            parameters += [copy(own, times) for times in range(1, more + 1) for own in layer]
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
    behind = [own if own is None or unit is None else own + more for own in facts.units[at + 1 :]]
    copies = [None if unit is None else unit + times for times in range(1, more + 1)]
    return (*facts.units[: at + 1], *copies, *behind)


def _with_more_buffers(facts: ModelFacts, at: int, more: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    buffers = [
        (size, tuple(block if block <= at else block + more for block in blocks)) for size, blocks in facts.buffers
    ]
    copies = [
        (size, (at + times,)) for size, blocks in facts.buffers if blocks == (at,) for times in range(1, more + 1)
    ]
    return (*buffers, *copies)
