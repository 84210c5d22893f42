"""A transformer block in every tensor mode, and attention over a split sequence, beside those of one process.

The ranks share one device, so the ratio says what a mode costs in work and in messages through the host, not what it
gains. Checked first: output and all gradients against plain torch, and the bytes that are sent against the formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks import common, tensor
from benchmarks.common import Spread
from benchmarks.gpu.section import Case, Figures
from benchmarks.ranks import RankGroup
from benchmarks.sequence import ring_and_ulysses
from benchmarks.sequence_cases import AttentionCase, Counted, Shape
from benchmarks.tensor_cases import CASES, PLAIN, block_traffic
from benchmarks.tensor_report import MB, Bench
from benchmarks.workload import Workload
from colossus.sequence_parallel.traffic import attention_traffic

ON_GPU = Workload(hidden=1024, layers=1, heads=16, tokens=512, batch=8, vocab=1, device="cuda:0")
ON_CPU = Workload(hidden=64, layers=1, heads=8, tokens=16, batch=8, vocab=1)
MODES = (
    "1d-2", "1d-sequence-2", "1d-4", "1d-sequence-4", "2d-2x2", "2d-2x2-keep", "2d-2x2-panels", "2.5d-2x2x2",
    "3d-2x2x2", "3d-2x2x2-keep",
)  # fmt: skip
SEQUENCES = (("ring", 2), ("ring", 4), ("ulysses", 4), ("hybrid", 4))
ATTENTION_TOLERANCE = 1e-4


class OneProcess:
    """What all cases are compared with, made when the first asks. A rank has it: what has used CUDA cannot be forked.

    Args:
        make: the `RankGroup` of one rank.
        method: of its worker, gives the values to compare with.
    """

    def __init__(self, make: Callable[[], RankGroup], method: str) -> None:
        self._make, self._method = make, method
        self._group: RankGroup | None = None
        self._values: Any = None

    @property
    def group(self) -> RankGroup:
        if self._group is None:
            self._group = self._make()
            self._values = self._group.call(self._method)[0]
        return self._group

    @property
    def values(self) -> Any:
        assert self.group is not None
        return self._values

    def beside(self, ranks: RankGroup, blocks: int, calls: int) -> dict[str, float]:
        """Milliseconds of both, and their ratio."""
        runners = {"ranks": partial(_slowest, ranks, calls), "one": partial(_slowest, self.group, calls)}
        series = common.alternate(runners, blocks)
        return {
            "ms": Spread.of(series["ranks"]).median * 1e3,
            "ms of one process": Spread.of(series["one"]).median * 1e3,
            "time / one process": common.ratio(series, "ranks", "one").median,
        }

    def close(self) -> None:
        if self._group is not None:
            self._group.close()


def _slowest(group: RankGroup, calls: int) -> float:
    return max(group.call("block", calls))


def cases(device: torch.device, budget: float) -> Iterator[Case]:
    on_gpu = device.type == "cuda"
    bench = Bench(ON_GPU if on_gpu else ON_CPU, blocks=5 if on_gpu else 3, steps=5 if on_gpu else 1, microbatches=0)
    tensor.load([CASES[name] for name in MODES])
    plain = OneProcess(partial(tensor.make_group, bench, PLAIN, CASES[PLAIN]), "reference")
    for name in MODES:
        yield Case(f"block {name}", partial(_block, bench, plain, name), seconds=90)
    plain.close()
    shape = Shape(tokens=8192, heads=16, kv_heads=4, device="cuda:0") if on_gpu else Shape(tokens=128, kv_heads=4)
    whole = OneProcess(partial(_attention_group, shape, "ring", 1), "result")
    for mode, n in SEQUENCES:
        yield Case(f"attention {mode} {n}", partial(_attention, shape, bench, whole, mode, n), seconds=90)
    whole.close()


def _block(bench: Bench, plain: OneProcess, name: str) -> Figures:
    case = CASES[name]
    reference = plain.values  # before the others, which it would wait for
    with tensor.make_group(bench, name, case) as ranks:
        gaps = ranks.call("gaps", reference)
        for gap in gaps:
            tensor.check(name, gap)
        counted, formula = ranks.call("count"), block_traffic(case, bench.workload)
        tensor.check_traffic(name, counted, formula)
        times = plain.beside(ranks, bench.blocks, bench.steps)
        peaks = _most(ranks.call("peak"))
        of_one = _most(plain.group.call("peak"))
    return {
        **times,
        "off by": max(max(gap.values()) for gap in gaps),
        "MB sent": counted[0].bytes / MB,
        "MiB at most": peaks,
        "MiB of one process": of_one,
    }


def _most(peaks: Sequence[int | None]) -> float | None:
    found = [peak for peak in peaks if peak is not None]
    return max(found) / 2**20 if found else None


def _attention_group(shape: Shape, mode: str, n: int) -> RankGroup:
    return RankGroup(f"{mode} x {n}", n, partial(_make_attention, shape, mode, n))


def _make_attention(shape: Shape, mode: str, world: int, rank: int) -> AttentionCase:
    return AttentionCase(shape, mode, rank, world)


def _attention(shape: Shape, bench: Bench, whole: OneProcess, mode: str, n: int) -> Figures:
    values = whole.values
    with _attention_group(shape, mode, n) as ranks:
        gap = max(ranks.call("gap", values))
        if not gap <= ATTENTION_TOLERANCE:
            raise AssertionError(f"output or gradients differ from one process by {gap:.3g} of their largest number")
        counted: list[Counted] = ranks.call("count")
        formula = attention_traffic(
            shape.tokens * shape.batch, shape.heads, shape.kv_heads, shape.head_dim, **ring_and_ulysses(mode, n)
        )
        for rank, found in enumerate(counted):
            if (found.forward, found.backward) != (formula.forward, formula.backward):
                raise AssertionError(f"rank {rank} sent {found}, but the formula says {formula}")
        times = whole.beside(ranks, bench.blocks, bench.steps)
    return {**times, "off by": gap, "MB sent": 4 * (counted[0].forward + counted[0].backward) / MB}
