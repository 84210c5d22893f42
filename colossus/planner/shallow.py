"""Models of many equal layers are profiled with two: all further layers cost the same as the second."""

from __future__ import annotations

import re
from collections.abc import Sequence
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
