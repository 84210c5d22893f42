"""Which tables a model has, before a pipeline cuts it and before it has values."""

from __future__ import annotations

from torch import nn

from colossus.context.parallel_context import ParallelContext
from colossus.gradients.axes import gradient_sum_axes
from colossus.layout.parameter import spec_of
from colossus.sparse.choice import Survey, TableFacts
from colossus.sparse.plain_modules import require_lazy
from colossus.sparse.tables import table_modules


def survey(model: nn.Module, context: ParallelContext) -> Survey:
    """The tables of a whole model on the meta device, as this rank computes with them.

    Tables that something else computes with, too, are from now on dense in all their lookups: every row is touched.

    Raises:
        ValueError: for what lookups of torch's modules cannot do here.
    """
    lookups: dict[int, list[nn.Parameter]] = {}
    for name, module, table in table_modules(model):
        require_lazy(name, module)
        lookups.setdefault(id(module), []).append(table)
    tables = {id(table): table for each in lookups.values() for table in each}
    tied: dict[int, str] = {}
    for name, module in model.named_modules():
        for param in module.parameters(recurse=False):
            if id(param) in tables and id(module) not in lookups:
                tied.setdefault(id(param), f"{name or 'the model'} ({type(module).__name__})")
    facts = []
    for weight in tables.values():
        spec, axes = spec_of(weight), gradient_sum_axes(weight, context)
        ranks = context.size(axes)
        shape, held, precision = spec.shards[0].shape, tuple(weight.shape), context.precision
        # rows are stored, and their gradients are summed, as wide as the optimizer's; what is tied is as other weights
        is_tied = id(weight) in tied
        itemsize = (precision.reduce_dtype(precision.gradients) if is_tied else precision.optimizer).itemsize
        facts.append(TableFacts(spec.name, shape, held, itemsize, ranks, tied.get(id(weight))))
    for module in model.modules():
        if any(id(table) in tied for table in lookups.get(id(module), ())):
            module.sparse = False  # type: ignore[assignment]
    others = (name for name, param in model.named_parameters() if id(param) not in tables)
    return Survey(tuple(facts), tuple(others))
