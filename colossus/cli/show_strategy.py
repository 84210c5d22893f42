"""``colossus show --strategy``: what the data-parallel strategy sends in a step for each parameter."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_leaves

from colossus.arithmetic import aligned, byte_count, counted
from colossus.comm.accounting import sent
from colossus.config import Config, ConfigError
from colossus.config.plans import name_of, strategy_options
from colossus.config.sizes import describe_sizes
from colossus.construct.build_model import build
from colossus.context.parallel_context import ParallelContext
from colossus.data.make_loaders import loaders_of
from colossus.data_parallel.options.exact_options import HybridOptions
from colossus.gradients.buckets import gradient_sum_axes
from colossus.registry import MODELS, STRATEGIES
from colossus.sparse.choice import Choice, Survey, WayName, bytes_sent, choose
from colossus.sparse.tables import survey

_HEADER = ("parameter", "shape", "on a rank", "alpha", "dense", "gather", "owners", "way")
_NONE = "-"


@dataclass(frozen=True)
class _Table:
    """A table and its way.

    Attributes:
        alpha: the part of its rows that a rank touches in a step; None: unknown, and taken for 1.
    """

    choice: Choice
    alpha: float | None

    def sent(self, way: WayName) -> float | None:
        """Bytes that a rank sends in a step; None for a way that the table cannot take."""
        table = self.choice.table
        if (table.tied and way != "dense") or (way == "owners" and not table.can_be_owned):
            return None
        return bytes_sent(way, table.ranks, table.size, 1.0 if self.alpha is None else self.alpha)


def render_strategy(config: Config, width: int) -> str:
    """What a resolved config's strategy does with the parameters of its model, for a terminal of some width.

    Raises:
        ConfigError: for a config without a model, for a model that cannot be built, and for what the strategy refuses.
    """
    strategy = STRATEGIES.build(config.parallel.data_strategy)
    found, dense = _parameters(config, strategy)
    parallel, options = config.parallel, strategy_options(config)
    assert parallel.data is not None
    name = f"zero = {parallel.zero.stage}" if parallel.zero.stage else name_of(parallel.strategy.type)
    promise = options.describe(parallel.data) if options is not None and not parallel.zero.stage else ""
    head = [("strategy", name + (f" ({promise})" if promise else "")), ("", _first_line(strategy))]
    head.append(("plan", describe_sizes(parallel)))
    if found.tables:
        head.append(("bytes", "that a rank sends in a step; rows alone, without their ids"))
    sections = ["\n".join(line for key, text in head for line in _wrapped(f"{key:<12}", text, width))]
    held = byte_count(sum(size for size, _ in dense))
    all_reduced = sum(sent("all_reduce", ranks, size) for size, ranks in dense)
    title = counted(len(dense), "dense parameter")
    if not found.tables:
        sections.append(f"{title}, {held} on a rank; their all-reduce is {byte_count(all_reduced)} sent by a rank")
        return "\n\n".join(sections)
    tables = _tables(config, found, options)
    rows = [_row(each) for each in tables]
    rows += [(title, _NONE, held, _NONE, byte_count(all_reduced), _NONE, _NONE, "dense")] if dense else []
    sections.append(aligned([_HEADER, *rows], left=(0, 1, 2, 3, 7)))
    sections.append(_totals(tables, all_reduced))
    sections.append("\n".join(line for note in _notes(tables) for line in _wrapped("", note, width)))
    return "\n\n".join(sections)


def _parameters(config: Config, strategy: Any) -> tuple[Survey, list[tuple[int, int]]]:
    """The tables of the model, and of its other parameters (bytes on a rank, ranks that sum the gradient)."""
    if config.model is None:
        raise ConfigError("model: the config has none, so nothing is known of its parameters", config.source)
    spec, found, dense = config.model.spec(), Survey(), list[tuple[int, int]]()

    def look(model: nn.Module) -> None:
        nonlocal found
        found = survey(model, context)
        tables = {table.name for table in found.tables}
        for name, param in model.named_parameters():
            if name not in tables and param.requires_grad and not isinstance(param, UninitializedParameter):
                size = param.numel() * context.precision.params.itemsize
                dense.append((size, context.size(gradient_sum_axes(param, context))))

    try:
        context = ParallelContext.from_config(config, connect=False)
        build(lambda: MODELS.build(spec), context, materialize=False, prepare=look)
        strategy.check_tables(found)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error), config.source) from error
    return found, dense


def _tables(config: Config, found: Survey, options: Any) -> list[_Table]:
    """Under a strategy that sends no rows all are dense, and say what hybrid would take."""
    ids = _integers_of_a_batch(config)
    tables = []
    for table in found.tables:
        if isinstance(options, HybridOptions):
            choice = choose(table, options.way_of(table.name))
        else:
            choice = Choice(table, "dense", f"hybrid: {choose(table).way}")
        rows = 0 if ids is None else int(((ids >= 0) & (ids < table.shape[0])).sum())
        tables.append(_Table(choice, rows / table.shape[0] if rows else None))
    return tables


def _integers_of_a_batch(config: Config) -> Tensor | None:
    """The different integers of the first batch of a data rank; None without data."""
    if config.data is None:
        return None
    try:
        loaders = loaders_of(config, config.data, data_rank=0, data_size=config.parallel.data or 1, device="cpu")
        batch = next(loaders.train)
    except Exception:  # of a user's own data code: training raises it again
        return None
    integers = [x.flatten() for x in tree_leaves(batch) if isinstance(x, Tensor) and not x.is_floating_point()]
    return torch.unique(torch.cat([x.to(torch.int64) for x in integers])) if integers else None


# -- lines ------------------------------------------------------------------------------------------------------


def _wrapped(key: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(key + text, max(50, width), subsequent_indent=" " * len(key))


def _first_line(strategy: Any) -> str:
    return (inspect.getdoc(type(strategy)) or "").partition("\n\n")[0].replace("\n", " ").replace("``", "")


def _row(found: _Table) -> tuple[str, ...]:
    table, way = found.choice.table, found.choice.way
    held = table.held if way != "owners" else (-(-table.held[0] // table.ranks), *table.held[1:])
    alpha = "unknown" if found.alpha is None else f"{found.alpha:.3g} (batch)"
    sends = [found.sent(each) for each in ("dense", "gather", "owners")]
    return (
        table.name,
        _shape(table.shape),
        _shape(held),
        "1 (tied)" if table.tied else alpha,
        *(_NONE if each is None else byte_count(each) for each in sends),
        way,
    )


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _totals(tables: Sequence[_Table], dense: float) -> str:
    def total(way: WayName | None) -> float:
        """With all tables by one way, where they can take it; None: each by its own."""
        return dense + sum(each.sent(way or each.choice.way) or each.sent("dense") or 0.0 for each in tables)

    own = total(None)
    rows = [("this plan", own), ("all dense (all_reduce, DDP)", total("dense"))]
    rows.append(("rows gathered (DDP with sparse=True)", total("gather")))
    width = max(len(name) for name, _ in rows)
    times = [f"  x {number / own:.3g}" if own and number != own else "" for _, number in rows]
    lines = [f"  {name:<{width}}  {byte_count(number):>8}{x}" for (name, number), x in zip(rows, times, strict=True)]
    return "\n".join(["in all", *lines])


def _notes(tables: Sequence[_Table]) -> list[str]:
    lines = [f"{each.choice.table.name}: {each.choice.way}: {each.choice.why}" for each in tables]
    lines.append(
        "alpha: the part of its rows that a rank touches in a step, here the different integers of the first batch "
        "(sampled negatives come on top); an unknown alpha is taken for 1. A run's metrics.jsonl has the true one"
    )
    return lines
