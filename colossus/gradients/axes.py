"""Over which mesh axes a gradient is to be summed."""

from __future__ import annotations

from torch import nn

from colossus.comm.objects import all_gather_object
from colossus.context.parallel_context import ParallelContext
from colossus.layers.model_parallel import model_parallel_of
from colossus.layout.parameter import spec_of


def gradient_sum_axes(parameter: nn.Parameter, context: ParallelContext) -> tuple[str, ...]:
    """The axes over which this rank's gradient of a parameter is a partial sum: the one answer to that question.

    Layers record them at each use of a parameter. One that none has recorded is a plain torch module's, whose input is
    in the whole layout: sharded over the batch only. Over the axes that cut a parameter for storage its gradient has
    been scattered.
    """
    spec = spec_of(parameter)
    recorded = spec.gradient_axes
    axes = recorded if recorded is not None else model_parallel_of(context).regions.whole.shard_axes
    nontrivial = {axis for axis in axes if context.grid.sizes[axis] > 1 and axis not in spec.layout.stored}
    return tuple(axis for axis in context.grid.names if axis in nontrivial)


def agree_on_axes(parameters: list[nn.Parameter], context: ParallelContext) -> list[nn.Parameter]:
    """Share what each rank has recorded about parameters whose axes are decided by their first use.

    A layer may be used on some ranks only, or not before a later step. Collective: all ranks of a stage call it with
    the same parameters.

    Returns:
        Those that no rank has used yet.
    """
    if not parameters:
        return []
    names = context.grid.names
    masks = []  # 0: not used yet; else bit 0, and bit 1 + i for the i-th axis
    for parameter in parameters:
        axes = spec_of(parameter).gradient_axes
        masks.append(0 if axes is None else 1 + sum(2 << names.index(axis) for axis in axes))
    peers = context.group(tuple(name for name in names if name != "pipeline"))
    unused = []
    for parameter, *found in zip(parameters, *all_gather_object(masks, peers), strict=True):
        mask = max(found)
        if mask:
            spec_of(parameter).record(tuple(axis for index, axis in enumerate(names) if mask & (2 << index)))
        else:
            unused.append(parameter)
    return unused
