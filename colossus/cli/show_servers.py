"""What each server of a plan holds, for ``colossus show --strategy``."""

from __future__ import annotations

import math

from colossus.arithmetic import byte_count
from colossus.data_parallel.forecast import Forecast
from colossus.server.sharding import Sharding, TensorSpec


def render_servers(found: Forecast, num_servers: int) -> str:
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
    widths = [max(map(len, column)) for column in zip(header, *table, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in (header, *table)
    )
