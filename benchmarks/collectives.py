"""Forms of the all-reduce between the processes of one host, by size and number of ranks.

    python -m benchmarks.collectives

`shared` is colossus's all-reduce through shared memory, `c10d` the same call on gloo. Beside them plain torch:
`all_reduce`, `gather+sum` (all-gather, then a local sum) and `scatter+gather` (reduce-scatter, then all-gather).

The last columns divide shared by c10d: waited for at once, and with matmuls between start and wait that take about as
long as c10d does, as the gradient of a weight between start and end of the sum of dx.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from benchmarks import common
from benchmarks.common import Series, Spread
from benchmarks.ranks import RankGroup
from colossus import torch_versions
from colossus.comm import collectives, shared_memory
from colossus.context.groups import AxisGroup

SHARED, C10D = "shared", "c10d"
FORMS = (SHARED, C10D, "all_reduce", "gather+sum", "scatter+gather")
SIZES = [4 << (2 * power) for power in range(0, 12, 2)] + [8 << 20]  # 4 bytes .. 8 MB
DTYPE = torch.float32


class Worker:
    """One rank; ``x`` is all-reduced in place by every form."""

    def __init__(self, world: int, rank: int) -> None:
        self.world, self.rank = world, rank
        world_group = dist.group.WORLD
        self.groups = {form: AxisGroup(("tensor",), tuple(range(world)), rank, world_group) for form in (SHARED, C10D)}
        for form, group in self.groups.items():  # a group finds its way at its first use
            shared_memory.enable(form == SHARED)
            collectives.all_reduce(torch.zeros(1), group).wait()
        self.square = torch.ones(64, 64)
        self.forms: dict[str, Callable[[Tensor], Tensor]] = {
            SHARED: partial(self._colossus, SHARED, 0),
            C10D: partial(self._colossus, C10D, 0),
            "all_reduce": self._all_reduce,
            "gather+sum": self._gather_sum,
            "scatter+gather": self._scatter_gather,
        }

    def check(self, form: str, count: int) -> bool:
        """Whether a form gives the sum."""
        pattern = (torch.arange(count) % 1000).to(DTYPE)  # small whole numbers: the sum is exact in any order
        x, expected = pattern + self.rank, pattern * self.world + sum(range(self.world))
        return torch.equal(self.forms[form](x), expected)

    def time(self, form: str, count: int, repeats: int, matmuls: int = 0) -> float:
        """Seconds per call, after one that is not timed and brings the ranks together.

        Args:
            matmuls: run between start and wait (colossus's forms only).
        """
        x = torch.zeros(count, dtype=DTYPE)
        run = self.forms[form]
        if matmuls:
            run = partial(self._colossus, form, matmuls)
        run(x)
        begin = time.perf_counter()
        for _ in range(repeats):
            run(x)
        return (time.perf_counter() - begin) / repeats

    def matmul(self, repeats: int) -> float:
        """Seconds of the one matmul that overlaps."""
        begin = time.perf_counter()
        for _ in range(repeats):
            self.square @ self.square
        return (time.perf_counter() - begin) / repeats

    def _colossus(self, form: str, matmuls: int, x: Tensor) -> Tensor:
        pending = collectives.all_reduce(x, self.groups[form], owned=True)
        for _ in range(matmuls):
            self.square @ self.square
        return pending.wait()

    def _all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def _gather_sum(self, x: Tensor) -> Tensor:
        gathered = x.new_empty(self.world * len(x))
        torch_versions.all_gather_single(gathered, x)
        return torch.sum(gathered.view(self.world, -1), 0, out=x)

    def _scatter_gather(self, x: Tensor) -> Tensor:
        rest = -len(x) % self.world
        padded = torch.nn.functional.pad(x, (0, rest)) if rest else x
        part = x.new_empty(len(padded) // self.world)
        torch_versions.reduce_scatter_single(part, padded)
        torch_versions.all_gather_single(padded, part)
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


def overlapped(group: RankGroup, count: int, blocks: int, repeats: int, seconds: float) -> Series:
    """Seconds of shared and of c10d, each with matmuls of about ``seconds`` between start and wait."""
    matmuls = max(1, round(seconds / max(group.call("matmul", 20))))
    runners = {form: partial(_time, group, form, count, repeats, matmuls) for form in (SHARED, C10D)}
    return common.alternate(runners, blocks, label=f"{group.world} ranks, overlapped:")


def _time(group: RankGroup, form: str, count: int, repeats: int, matmuls: int = 0) -> float:
    return max(group.call("time", form, count, repeats, matmuls))


def _bytes(size: int) -> str:
    for unit, scale in (("MB", 1 << 20), ("KB", 1 << 10)):
        if size >= scale:
            return f"{size // scale} {unit}"
    return f"{size} B"


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.make_parser(__doc__, blocks=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 8], help="numbers of ranks (default 2 3 4 8)")
    parser.add_argument("--max-bytes", type=int, default=SIZES[-1], help="largest tensor (default 8 MB)")
    arguments = parser.parse_args(argv)
    worlds, sizes = arguments.ranks, [size for size in SIZES if size <= arguments.max_bytes]
    blocks, budget = arguments.blocks, 4 << 20
    if arguments.smoke:
        worlds, sizes, blocks, budget = [2, 3], [4, 4 << 10], 2, 0
    results: list[dict[str, Any]] = []
    for world in worlds:
        rows = []
        with RankGroup(f"{world} ranks", world, partial(Worker, world)) as group:
            for size in sizes:
                repeats, count = max(2, min(30, budget // size)), size // DTYPE.itemsize
                series = measure(group, FORMS, count, blocks, repeats)
                under = overlapped(group, count, blocks, repeats, Spread.of(series[C10D]).median)
                spreads = [common.ratio(series, SHARED, C10D), common.ratio(under, SHARED, C10D)]
                rows.append(
                    [_bytes(size), *(f"{Spread.of(series[form]).median * 1e6:.0f}" for form in FORMS), *spreads]
                )
                results.append({"ranks": world, "bytes": size, "seconds": series, "overlapped_seconds": under})
        header = ("size", *FORMS, "shared / c10d", "the same, overlapped")
        common.print_table(f"{world} ranks: microseconds per all-reduce, {blocks} blocks", header, rows)
    common.write_json(arguments.json, {"results": results})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
