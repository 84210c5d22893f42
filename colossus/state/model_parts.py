"""The parts that a rank has of a model's parameters and buffers, and which of them it writes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import Tensor, nn

from colossus.checkpoint.part import Part, Position, choose_writers
from colossus.context.parallel_context import ParallelContext
from colossus.layout.layout import Box, Layout
from colossus.layout.parameter import LogicalParameter, full_model_order, logical_parameters, reference_prefixes
from colossus.state.run import Run


def parts_of(run: Run, reference: nn.Module | None = None, *, replicas_differ: bool = False) -> list[Part]:
    """Return this rank's parts of the parameters of a run.

    Args:
        run: a run.
        reference: the frozen model inside the run's whose parameters they are; None: the run's model.
        replicas_differ: whether each replica writes every box; else each box is written once.
    """
    elsewhere = [run.store.stored(param) for param in run.strategy.parts.counted_elsewhere]
    model = run.model if reference is None else reference
    return parameter_parts(model, run.context, elsewhere, replicas_differ=replicas_differ)


def parameter_parts(
    model: nn.Module,
    context: ParallelContext,
    counted_elsewhere: Iterable[nn.Parameter] = (),
    *,
    replicas_differ: bool = False,
) -> list[Part]:
    """Return the parts of all parameters as the rank stores them, in the order of the model; a tied one once.

    A rank that stores several ranges of a parameter's rows has a part for each. Parameters of a frozen reference inside
    the model (`colossus.models.reference`) are not there.

    Args:
        model: the rank's part of the model.
        context: the rank's context.
        counted_elsewhere: tied parameters, as stored, that an earlier pipeline stage has and writes.
        replicas_differ: whether each data rank has parameters of its own, and writes all of them.
    """
    sizes, coordinates = context.grid.sizes, context.coordinates
    apart = ("pipeline", *(context.grid.axes("data") if replicas_differ else ()))
    elsewhere = {id(param) for param in counted_elsewhere}
    named: dict[tuple[int, str], tuple[LogicalParameter, dict[str, Position]]] = {}
    order, others = full_model_order(model), reference_prefixes(model)
    for number, logical in enumerate(logical_parameters(model, keep_ties=True)):
        _, names = named.setdefault((id(logical.parameter), logical.shard_name), (logical, {}))
        names[logical.name] = order[logical.parameter_name], number
    logicals = [logical for logical, _ in named.values() if not others or not logical.name.startswith(others)]
    # the largest first, so that the small ones even out what ranks write
    by_size = sorted(logicals, key=lambda logical: -math.prod(logical.shape))
    sized = [(logical.layout, logical.shape, logical.parameter.element_size()) for logical in by_size]
    chosen = choose_writers(sized, sizes, coordinates, apart)
    writes = {logical.name: is_writer for logical, is_writer in zip(by_size, chosen, strict=True)}
    is_first = all(index == 0 for axis, index in coordinates.items() if axis not in apart)
    parts = []
    for logical in logicals:
        names = named[id(logical.parameter), logical.shard_name][1]
        is_here = id(logical.parameter) not in elsewhere
        whole = logical.layout.box(logical.shape, sizes, coordinates)
        for number, (rows, box) in enumerate(_ranges(logical, whole)):
            parts.append(
                Part(
                    logical.name, logical.shape, box, logical.parameter, writes[logical.name] and is_here, rows,
                    logical.layout, logical.intervals, names, is_first and is_here and number == 0,
                )
            )  # fmt: skip
    return parts


def _ranges(logical: LogicalParameter, box: Box) -> Iterator[tuple[tuple[int, int] | None, Box]]:
    """Yield the ranges of rows that a rank stores of a parameter, each with its box.

    Args:
        logical: a logical parameter.
        box: the box that its layout gives this rank.
    """
    if logical.intervals is None:
        yield logical.rows, box
        return
    first = 0
    for start, stop in logical.intervals or [(0, 0)]:
        yield (first, first + stop - start), ((start, stop), *box[1:])
        first += stop - start


def buffer_parts(model: nn.Module) -> list[Part]:
    """Return the parts of the persistent buffers of a rank, which are whole; one with several names once."""
    order, others, persistent = full_model_order(model), reference_prefixes(model), model.state_dict(keep_vars=True)
    names_of: dict[int, tuple[Tensor, dict[str, Position]]] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in persistent:
            names_of.setdefault(id(buffer), (buffer, {}))[1][name] = order.get(name, len(order)), 0
    parts = []
    for buffer, names in names_of.values():
        first, *_ = names
        if not others or not first.startswith(others):
            part = Part.whole(first, buffer, names=names)
            parts.append(replace(part, memory=buffer, layout=Layout.whole(buffer.dim())))
    return parts
