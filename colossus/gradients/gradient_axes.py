"""The axes over which the gradients of a rank are partial sums."""

from __future__ import annotations

from torch import nn

from colossus.comm.objects import all_gather_object
from colossus.context.parallel_context import ParallelContext
from colossus.layers.model_parallel import model_parallel_of
from colossus.layout.parameter import ParameterSpec, spec_of


def partial_axes(spec: ParameterSpec, context: ParallelContext) -> tuple[str, ...]:
    """Return the axes over which the gradient of a whole parameter is a partial sum.

    Layers record these axes at each use of a parameter. A parameter without a record is a plain torch module's, whose
    input is in the whole layout, sharded over the batch only.
    """
    recorded = spec.gradient_axes
    return recorded if recorded is not None else model_parallel_of(context).regions.whole.shard_axes


def gradient_sum_axes(parameter: nn.Parameter, context: ParallelContext) -> tuple[str, ...]:
    """Return the axes of several ranks over which this rank's gradient of a parameter is a partial sum.

    Axes that shard a parameter for storage are left out: its gradient has been reduce-scattered over them.
    """
    spec = spec_of(parameter)
    axes = partial_axes(spec, context)
    nontrivial = {axis for axis in axes if context.grid.sizes[axis] > 1 and axis not in spec.layout.stored}
    return tuple(axis for axis in context.grid.names if axis in nontrivial)


def agree_on_axes(parameters: list[nn.Parameter], context: ParallelContext) -> list[nn.Parameter]:
    """Share the axes of parameters that some rank has used, and return the parameters that no rank has used yet.

    Collective over the ranks of a stage, since a layer may be used on some of them only.

    Args:
        parameters: those whose axes are decided by their first use, and were not decided at the last call.
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
    for parameter, *masks_of_ranks in zip(parameters, *all_gather_object(masks, peers), strict=True):
        mask = max(masks_of_ranks)
        if mask:
            spec_of(parameter).record(tuple(axis for index, axis in enumerate(names) if mask & (2 << index)))
        else:
            unused.append(parameter)
    return unused
