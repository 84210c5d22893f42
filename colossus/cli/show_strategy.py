"""``colossus show --strategy``: what the data-parallel strategy does with each parameter, and the bytes of it."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Sequence
from typing import Any

from colossus.arithmetic import byte_count
from colossus.cli.show_servers import render_servers
from colossus.config import Config
from colossus.config.plans import name_of, strategy_options
from colossus.config.sizes import describe_sizes
from colossus.data_parallel.forecast import Forecast, Hosts, TableForecast, forecast
from colossus.data_parallel.options.exact_options import HybridOptions
from colossus.data_parallel.options.server_options import ServerOptions
from colossus.sparse.cost import WAYS, WayName, bytes_sent

_HEADER = ("parameter", "shape", "on a rank", "alpha", "dense", "gather", "owners", "way")
_NONE = "-"


def render_strategy(config: Config, width: int) -> str:
    """What a resolved config's strategy does with the parameters of its model, for a terminal of some width.

    Raises:
        ConfigError: for a config without a model, for a model that cannot be built, and for what the strategy refuses.
    """
    found = forecast(config)
    parallel, options = config.parallel, strategy_options(config)
    assert parallel.data is not None
    name = f"zero = {parallel.zero.stage}" if parallel.zero.stage else name_of(parallel.strategy.type)
    promise = options.describe(parallel.data) if options is not None and not parallel.zero.stage else ""
    head = [("strategy", name + (f" ({promise})" if promise else "")), ("", _first_line(found.strategy))]
    head.append(("plan", describe_sizes(parallel)))
    if found.tables:
        head.append(("bytes", f"{_who_sends(found)}; rows alone, without their ids"))
    lines = [line for key, text in head for line in _wrapped(f"{key:<12}", text, width)]
    sections = ["\n".join(lines), _table(found, width)]
    if found.tables:
        sections.append(_totals(found))
        sections.append("\n".join(line for note in _notes(found, options) for line in _wrapped("", note, width)))
    if isinstance(options, ServerOptions):
        sections.append(render_servers(found, options.servers or 1))
    return "\n\n".join(sections)


def _wrapped(key: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(key + text, max(50, width), subsequent_indent=" " * len(key))


def _first_line(strategy: Any) -> str:
    return (inspect.getdoc(type(strategy)) or "").partition("\n\n")[0].replace("\n", " ").replace("``", "")


def _who_sends(found: Forecast) -> str:
    if found.hosts.number > 1:
        return f"that leave a host in a step, of {found.hosts.number}; its ranks add up rows before"
    return "that a rank sends in a step"


def _table(found: Forecast, width: int) -> str:
    rows = [_row(each) for each in found.tables]
    if found.dense:
        number = len(found.dense)
        dense = byte_count(sum(each.sent(found.hosts) for each in found.dense))
        title = f"{number} dense parameter{'' if number == 1 else 's'}"
        held = f"{byte_count(sum(each.size for each in found.dense))}"
        rows.append((title, _NONE, held, _NONE, dense, _NONE, _NONE, "dense"))
    if not found.tables:
        return "\n".join(f"{row[0]}, {row[2]} on a rank; their all-reduce is {row[4]} sent by a rank" for row in rows)
    widths = [max(map(len, column)) for column in zip(_HEADER, *rows, strict=True)]
    if sum(widths) + 2 * (len(widths) - 1) <= width:
        return "\n".join(_aligned(row, widths) for row in (_HEADER, *rows))
    return "\n".join(_block(row) for row in rows)


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    right = (4, 5, 6)  # bytes
    cells = (
        f"{cell:>{w}}" if at in right else f"{cell:<{w}}" for at, (cell, w) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join(cells).rstrip()


def _block(row: Sequence[str]) -> str:
    """For a narrow terminal: a parameter on several lines."""
    return "\n".join(
        [row[0], *(f"  {name:<10} {cell}" for name, cell in zip(_HEADER[1:], row[1:], strict=True) if cell != _NONE)]
    )


def _row(found: TableForecast) -> tuple[str, ...]:
    table, way = found.table, found.choice.way
    held = table.held if way != "owners" else (-(-table.held[0] // table.ranks), *table.held[1:])
    sent = {each: byte_count(found.sent[each]) if each in found.sent else _NONE for each in WAYS}
    return (
        table.name,
        _shape(table.shape),
        _shape(held),
        _alpha(found),
        sent["dense"],
        sent["gather"],
        sent["owners"],
        way,
    )


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _alpha(found: TableForecast) -> str:
    if found.table.tied is not None:
        return "1 (tied)"
    return "unknown" if found.source == "unknown" else f"{found.alpha:.3g} ({found.source})"


def _totals(found: Forecast) -> str:
    """Beside what it would be without ways: of rings over all ranks one link leaves each host, too."""
    own = sum(each.sent(found.hosts) for each in found.dense)
    own += sum(each.sent[each.choice.way] for each in found.tables)
    ring = sum(each.sent(Hosts()) for each in found.dense)
    rows = [("this plan", own), ("all dense (all_reduce, DDP)", ring + _tables(found, "dense"))]
    rows.append(("rows gathered (DDP with sparse=True)", ring + _tables(found, "gather")))
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {byte_count(sent):>8}{_times(sent, own)}" for name, sent in rows]
    return "\n".join(["in all", *lines])


def _tables(found: Forecast, way: WayName) -> float:
    """All tables by one way, but for those that are tied; between ranks."""
    return sum(
        bytes_sent("dense" if each.table.tied else way, each.table.ranks, each.table.size, each.alpha)
        for each in found.tables
    )


def _times(sent: float, own: float) -> str:
    return f"  x {sent / own:.3g}" if own and sent != own else ""


def _notes(found: Forecast, options: Any) -> list[str]:
    lines = [f"{each.table.name}: {each.choice.way}: {each.choice.why}" for each in found.tables]
    sources = {each.source for each in found.tables if each.table.tied is None}
    if "batch" in sources:
        lines.append(
            "alpha: the part of its rows that a rank touches in a step, here the different integers of the first batch "
            "(sampled negatives come on top); a run's metrics.jsonl has the true one, parallel.strategy.alpha takes it"
        )
    if "unknown" in sources:
        lines.append("an unknown alpha is taken for 1; parallel.strategy.alpha gives it")
    if isinstance(options, HybridOptions) and options.hosts is None and options.per_host is None:
        lines.append("all ranks are taken to be on one host; parallel.strategy.hosts=2 shows two, as --nnodes")
    return lines
