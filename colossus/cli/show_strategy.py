"""``colossus show --strategy``: what the data-parallel strategy does with each parameter, and the bytes of it."""

from __future__ import annotations

import inspect
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from colossus.arithmetic import aligned, byte_count, counted
from colossus.config import Config
from colossus.config.plans import name_of, strategy_options
from colossus.config.sizes import describe_sizes
from colossus.data_parallel.forecast import Forecast, Hosts, TableForecast, forecast
from colossus.data_parallel.options.exact_options import HybridOptions
from colossus.data_parallel.options.server_options import ServerOptions
from colossus.server.sharding import Sharding, TensorSpec
from colossus.sparse.cost import WayName, bytes_sent

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
    sections = ["\n".join(lines), _table(found)]
    if found.tables:
        sections.append(_totals(found))
        sections.append("\n".join(line for note in _notes(found, options) for line in _wrapped("", note, width)))
    if isinstance(options, ServerOptions):
        sections.append(_servers(found, options.servers or 1))
    return "\n\n".join(sections)


def _wrapped(key: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(key + text, max(50, width), subsequent_indent=" " * len(key))


def _first_line(strategy: Any) -> str:
    return (inspect.getdoc(type(strategy)) or "").partition("\n\n")[0].replace("\n", " ").replace("``", "")


def _who_sends(found: Forecast) -> str:
    if found.hosts.number > 1:
        return f"that leave a host in a step, of {found.hosts.number}; its ranks add up rows before"
    return "that a rank sends in a step"


def _table(found: Forecast) -> str:
    rows = [_row(each) for each in found.tables]
    if found.dense:
        sent = byte_count(sum(each.sent(found.hosts) for each in found.dense))
        held, title = byte_count(sum(each.size for each in found.dense)), counted(len(found.dense), "dense parameter")
        if not found.tables:
            return f"{title}, {held} on a rank; their all-reduce is {sent} sent by a rank"
        rows.append((title, _NONE, held, _NONE, sent, _NONE, _NONE, "dense"))
    return aligned([_HEADER, *rows], left=(0, 1, 2, 3, 7))


def _row(found: TableForecast) -> tuple[str, ...]:
    table, way = found.table, found.choice.way
    held = table.held if way != "owners" else (-(-table.held[0] // table.ranks), *table.held[1:])
    sent = [byte_count(found.sent[each]) if each in found.sent else _NONE for each in ("dense", "gather", "owners")]
    return (table.name, _shape(table.shape), _shape(held), _alpha(found), *sent, way)


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


def _servers(found: Forecast, num_servers: int) -> str:
    """Rows and bytes of the parameters that each server holds; the state of its optimizer comes on top."""
    specs = []
    for each in found.dense:
        shards = max(1, round(math.prod(each.shape) / max(1, math.prod(each.held))))
        itemsize = each.size // max(1, math.prod(each.held))
        specs += [TensorSpec(f"{each.name}[{shard}]", each.held, itemsize) for shard in range(shards)]
    sharding = Sharding(num_servers)
    sharding.place(specs)
    rows = [0] * num_servers
    tensors = [0] * num_servers
    for ranges in sharding.ranges.values():
        for part in ranges:
            rows[part.server] += len(part)
            tensors[part.server] += 1
    header = ("server", "rows", "of tensors", "bytes")
    table = [
        (str(server), f"{rows[server]:,}", str(tensors[server]), byte_count(sharding.loads[server]))
        for server in range(num_servers)
    ]
    return aligned([header, *table])
