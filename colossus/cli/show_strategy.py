"""``colossus show --strategy``: the bytes that the data-parallel strategy sends in a step for each parameter."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter

from colossus.arithmetic import aligned, byte_count, counted
from colossus.comm.accounting import sent
from colossus.config import Config, ConfigError
from colossus.config.errors import as_config_errors
from colossus.config.plan_head import as_lines, plan_head
from colossus.config.plans import name_of, strategy_options
from colossus.construct.build_model import build
from colossus.context.parallel_context import ParallelContext
from colossus.data_parallel.options.exact_options import HybridOptions
from colossus.gradients.gradient_axes import gradient_sum_axes
from colossus.layout.split_parameter import local_shape
from colossus.registry import MODELS, STRATEGIES
from colossus.sparse.choice import Choice, Survey, bytes_sent, choose
from colossus.sparse.tables import survey

_HEADER = ("parameter", "shape", "dense", "gather", "owners", "way")
_NOTE = """\
bytes that a rank sends in a step; alpha: the fraction of a table's rows that a rank uses in a step (alpha.<table> in
metrics.jsonl)"""


def render_strategy(config: Config) -> str:
    """Return a table of the bytes that a resolved config's strategy sends for the parameters of its model.

    Raises:
        ConfigError: the config has no model, the model cannot be built, or the strategy refuses it.
    """
    parallel, options = config.parallel, strategy_options(config)
    surveyed, dense = _parameters(config, STRATEGIES.build(parallel.data_strategy))
    rows = []
    for table in surveyed.tables:
        is_hybrid = isinstance(options, HybridOptions)
        choice = choose(table, options.way_of(table.name)) if is_hybrid else Choice(table, "dense", "sent whole")
        dense_bytes, gather, owners = (
            byte_count(bytes_sent(way, table.ranks, table.size, alpha=1.0)) for way in ("dense", "gather", "owners")
        )
        by_rows = ("-" if table.tied else f"{gather} x alpha", f"{owners} x alpha" if table.can_be_owned else "-")
        shape = " x ".join(map(str, table.shape))
        rows.append((table.name, shape, dense_bytes, *by_rows, f"{choice.way}: {choice.why}"))
    all_reduced = byte_count(sum(sent("all_reduce", ranks, size) for size, ranks in dense))
    rows.append((counted(len(dense), "dense parameter"), "-", all_reduced, "-", "-", "dense"))
    name = f"zero = {parallel.zero.stage}" if parallel.zero.stage else name_of(parallel.strategy.type)
    promise = options.describe(parallel.data) if options is not None and not parallel.zero.stage else ""
    head = as_lines({"strategy": f"{name}{promise and f' ({promise})'}", "plan": plan_head(config)["plan"]})
    return "\n\n".join([head, aligned([_HEADER, *rows], left_columns=(0, 1, 5)), *([_NOTE] if surveyed.tables else [])])


def _parameters(config: Config, strategy: Any) -> tuple[Survey, list[tuple[int, int]]]:
    """Return the tables of the model, and (bytes on a rank, ranks that sum the gradient) of each other parameter."""
    if config.model is None:
        raise ConfigError("model: the config has none, so there are no parameters to show", config.source)
    spec, surveyed, dense = config.model.spec(), Survey(), list[tuple[int, int]]()

    def collect(model: nn.Module) -> None:
        nonlocal surveyed
        surveyed = survey(model, context)
        names = {table.name for table in surveyed.tables}
        for name, param in model.named_parameters():
            if name not in names and param.requires_grad and not isinstance(param, UninitializedParameter):
                size = local_shape(param).numel() * context.precision.params.itemsize
                dense.append((size, context.size(gradient_sum_axes(param, context))))

    with as_config_errors(source=config.source):
        context = ParallelContext.from_config(config, connect=False)
        build(lambda: MODELS.build(spec), context, materialize=False, prepare=collect)
        strategy.check_tables(surveyed)
    return surveyed, dense
