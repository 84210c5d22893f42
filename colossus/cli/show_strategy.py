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
from colossus.engine.sparse.choice import Choice, Parties
from colossus.engine.sparse.cost import WAYS, WayName, bytes_sent
from colossus.engine.sparse.forecast import Forecast, forecast
from colossus.engine.strategies.options.hybrid import HybridOptions
from colossus.engine.strategies.options.server import ServerOptions

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
    if found.choices:
        head.append(("bytes", f"{_parties(found)}; rows alone, without their ids"))
    lines = [line for key, text in head for line in _wrapped(f"{key:<12}", text, width)]
    sections = ["\n".join(lines), _table(found, width)]
    if found.choices:
        sections.append(_totals(found))
        sections.append("\n".join(line for note in _notes(found, options) for line in _wrapped("", note, width)))
    if isinstance(options, ServerOptions):
        sections.append(render_servers(found, options.servers or 1))
    return "\n\n".join(sections)


def _wrapped(key: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(key + text, max(50, width), subsequent_indent=" " * len(key))


def _first_line(strategy: Any) -> str:
    return (inspect.getdoc(type(strategy)) or "").partition("\n\n")[0].replace("\n", " ").replace("``", "")


def _parties(found: Forecast) -> str:
    if found.parties.are_hosts:
        return f"that leave a host in a step, of {found.parties.hosts}; its ranks add up rows before"
    return "that a rank sends in a step"


def _table(found: Forecast, width: int) -> str:
    rows = [_row(choice) for choice in found.choices]
    if found.dense:
        number = len(found.dense)
        dense = byte_count(sum(each.sent(found.parties) for each in found.dense))
        title = f"{number} dense parameter{'' if number == 1 else 's'}"
        held = f"{byte_count(sum(each.size for each in found.dense))}"
        rows.append((title, _NONE, held, _NONE, dense, _NONE, _NONE, "dense"))
    if not found.choices:
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


def _row(choice: Choice) -> tuple[str, ...]:
    table = choice.table
    held = table.held if choice.way != "owners" else (-(-table.held[0] // table.ranks), *table.held[1:])
    sent = {way: byte_count(choice.sent[way]) if way in choice.sent else _NONE for way in WAYS}
    return (
        table.name,
        _shape(table.shape),
        _shape(held),
        _alpha(choice),
        sent["dense"],
        sent["gather"],
        sent["owners"],
        choice.way,
    )


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _alpha(choice: Choice) -> str:
    return "1 (tied)" if choice.table.tied is not None else choice.alpha.in_words


def _totals(found: Forecast) -> str:
    """Beside what it would be without ways: of rings over all ranks one link leaves each host, too."""
    own = sum(each.sent(found.parties) for each in found.dense)
    own += sum(choice.sent[choice.way] for choice in found.choices)
    ring = sum(each.sent(Parties()) for each in found.dense)
    rows = [("this plan", own), ("all dense (all_reduce, DDP)", ring + _tables(found, "dense"))]
    rows.append(("rows gathered (DDP with sparse=True)", ring + _tables(found, "gather")))
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {byte_count(sent):>8}{_times(sent, own)}" for name, sent in rows]
    return "\n".join(["in all", *lines])


def _tables(found: Forecast, way: WayName) -> float:
    """All tables by one way, but for those that are tied; between ranks."""
    return sum(
        bytes_sent("dense" if table.tied else way, table.ranks, table.size, choice.alpha.rank)
        for choice in found.choices
        for table in (choice.table,)
    )


def _times(sent: float, own: float) -> str:
    return f"  x {sent / own:.3g}" if own and sent != own else ""


def _notes(found: Forecast, options: Any) -> list[str]:
    lines = [f"{choice.table.name}: {choice.way}: {choice.why}" for choice in found.choices if choice.why]
    sources = {choice.alpha.source for choice in found.choices if choice.table.tied is None}
    if "measured" in sources:
        lines.append("alpha: the part of its rows that a rank touches in a step, measured on the first batch")
    if isinstance(options, HybridOptions) and options.hosts is None and options.per_host is None:
        lines.append("all ranks are taken to be on one host; parallel.strategy.hosts=2 shows two, as --nnodes")
    if found.failure:
        lines.append(
            f"alpha could not be measured ({found.failure}), and is bounded by the integers of a batch; give it by "
            f"parallel.strategy.alpha"
        )
    return lines
