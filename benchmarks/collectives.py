"""Forms of the all-reduce on gloo by size and number of ranks, and up to which size the direct exchange is the fastest.

    python -m benchmarks.collectives

`exchange` is colossus's all-reduce in one round between all pairs, `c10d` the same call with the exchange switched
off; their crossing is what `_EXCHANGE_LIMIT` of colossus/comm/collectives.py should be. Beside them plain torch:
`all_reduce`, `gather+sum` (all-gather, then a local sum) and `scatter+gather` (reduce-scatter, then all-gather).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter

import torch
from torch import Tensor
from torch import distributed as dist

from benchmarks import common
from benchmarks.common import Series, Spread
from benchmarks.ranks import RankGroup
from colossus.comm import collectives
from colossus.context.groups import AxisGroup

EXCHANGE, C10D = "exchange", "c10d"
SIZES = [4 << (2 * power) for power in range(12)]  # 4 bytes .. 16 MB
DTYPE = torch.float32


class Worker:
    """One rank; ``x`` is all-reduced in place by every form."""

    def __init__(self, world: int, rank: int) -> None:
        self.world, self.rank = world, rank
        world_group = dist.group.WORLD
        self.group = AxisGroup(("tensor",), tuple(range(world)), rank, world_group)
        self.forms: dict[str, Callable[[Tensor], Tensor]] = {
            EXCHANGE: partial(self._colossus, 1 << 62),
            C10D: partial(self._colossus, 0),
            "all_reduce": self._all_reduce,
            "gather+sum": self._gather_sum,
            "scatter+gather": self._scatter_gather,
        }

    def check(self, form: str, count: int) -> bool:
        """Whether a form gives the sum."""
        pattern = (torch.arange(count) % 1000).to(DTYPE)  # small whole numbers: the sum is exact in any order
        x, expected = pattern + self.rank, pattern * self.world + sum(range(self.world))
        return torch.equal(self.forms[form](x), expected)

    def time(self, form: str, count: int, repeats: int) -> float:
        """Seconds per call, after one that is not timed and brings the ranks together."""
        x = torch.zeros(count, dtype=DTYPE)
        run = self.forms[form]
        run(x)
        begin = time.perf_counter()
        for _ in range(repeats):
            run(x)
        return (time.perf_counter() - begin) / repeats

    def _colossus(self, limit: int, x: Tensor) -> Tensor:
        collectives._EXCHANGE_LIMIT[self.world] = limit
        return collectives.all_reduce(x, self.group, owned=True).wait()

    def _all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def _gather_sum(self, x: Tensor) -> Tensor:
        gathered = x.new_empty(self.world * len(x))
        dist.all_gather_single(gathered, x)
        return torch.sum(gathered.view(self.world, -1), 0, out=x)

    def _scatter_gather(self, x: Tensor) -> Tensor:
        rest = -len(x) % self.world
        padded = torch.nn.functional.pad(x, (0, rest)) if rest else x
        part = x.new_empty(len(padded) // self.world)
        dist.reduce_scatter_single(part, padded)
        dist.all_gather_single(padded, part)
        return x.copy_(padded[: len(x)]) if rest else x


def measure(group: RankGroup, forms: Sequence[str], count: int, blocks: int, repeats: int) -> Series:
    """Seconds per call of every form, in alternating blocks; each form is checked first.

    Raises:
        RuntimeError: when a form does not give the sum.
    """
    for form in forms:
        if not all(group.call("check", form, count)):
            raise RuntimeError(f"{form} on {group.world} ranks: wrong sum of {count} numbers")
    runners = {form: partial(_time, group, form, count, repeats) for form in forms}
    return common.alternate(runners, blocks, label=f"{group.world} ranks, {_bytes(count * DTYPE.itemsize)}:")


def _time(group: RankGroup, form: str, count: int, repeats: int) -> float:
    return max(group.call("time", form, count, repeats))


def crossing(ratios: Sequence[tuple[int, Spread]]) -> int:
    """Largest size in bytes up to which the exchange beats c10d at every smaller size too; 0 when it never does."""
    limit = 0
    for size, spread in sorted(ratios, key=itemgetter(0)):
        if spread.median >= 1.0:
            break
        limit = size
    return limit


def _bytes(size: int) -> str:
    for unit, scale in (("MB", 1 << 20), ("KB", 1 << 10)):
        if size >= scale:
            return f"{size // scale} {unit}"
    return f"{size} B"


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.make_parser(__doc__, blocks=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 8], help="numbers of ranks (default 2 3 4 8)")
    parser.add_argument("--max-bytes", type=int, default=SIZES[-1], help="largest tensor (default 16 MB)")
    arguments = parser.parse_args(argv)
    worlds, sizes = arguments.ranks, [size for size in SIZES if size <= arguments.max_bytes]
    blocks, budget = arguments.blocks, 4 << 20
    if arguments.smoke:
        worlds, sizes, blocks, budget = [2, 3], [4, 4 << 10], 2, 0
    results, limits = [], {}
    for world in worlds:
        rows, ratios = [], []
        with RankGroup(f"{world} ranks", world, partial(Worker, world)) as group:
            forms = [EXCHANGE, C10D, "all_reduce", "gather+sum", "scatter+gather"]
            for size in sizes:
                repeats = max(2, min(30, budget // size))
                series = measure(group, forms, size // DTYPE.itemsize, blocks, repeats)
                spread = common.ratio(series, EXCHANGE, C10D)
                ratios.append((size, spread))
                rows.append([_bytes(size), *(f"{Spread.of(series[form]).median * 1e6:.0f}" for form in forms), spread])
                results.append({"ranks": world, "bytes": size, "seconds": series, "exchange_over_c10d": spread})
        limits[world] = crossing(ratios)
        common.print_table(
            f"{world} ranks: microseconds per all-reduce, {blocks} blocks", ("size", *forms, "exchange / c10d"), rows
        )
    print("\n  the exchange is the faster up to: " + ", ".join(f"{n} ranks {_bytes(b)}" for n, b in limits.items()))
    common.write_json(arguments.json, {"results": results, "exchange_limit": limits})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
