"""A transformer block in every tensor mode, and attention over a split sequence, beside those of one process.

The ranks share one device, so the ratio says what a mode costs in work and in messages through the host, not what it
gains. Checked first: output and all gradients against plain torch, and the bytes that are sent against the formula.

A device costs each rank seconds, so the rows are in the order of their ranks: those of as many are served by the same,
which build one case after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks import common, tensor
from benchmarks.common import Spread
from benchmarks.gpu.ranks import Inherited, RankPool
from benchmarks.gpu.section import Case, Figures
from benchmarks.sequence import ring_and_ulysses
from benchmarks.sequence_cases import AttentionCase, Counted, Shape
from benchmarks.tensor_cases import CASES, PLAIN, block_traffic
from benchmarks.tensor_cases import Case as BlockCase
from benchmarks.tensor_report import MB
from benchmarks.tensor_worker import Worker
from benchmarks.timing import take_turns
from benchmarks.workload import Workload
from colossus.sequence_parallel.modes import attention_traffic

MODES = (
    "1d-2", "1d-sequence-2", "1d-4", "1d-sequence-4", "2d-2x2", "2d-2x2-keep", "2.5d-2x2x2",
    "3d-2x2x2", "3d-2x2x2-keep",
)  # fmt: skip
SEQUENCES = (("ring", 2), ("ring", 4), ("ulysses", 4), ("hybrid", 4))
ATTENTION_TOLERANCE = 1e-4
BLOCK, ATTENTION = "block", "attention"


@dataclass(frozen=True)
class Sizes:
    """Of the block, and of the attention."""

    workload: Workload
    shape: Shape


#: as many key heads as query heads: of fewer in fp32 torch's attention has no other kernel than plain products
ON_GPU = Sizes(
    Workload(hidden=1024, layers=1, heads=16, tokens=512, batch=8, vocab=1, device="cuda:0"),
    Shape(tokens=8192, heads=16, kv_heads=16, device="cuda:0"),
)
ON_CPU = Sizes(Workload(hidden=64, layers=1, heads=8, tokens=16, batch=8, vocab=1), Shape(tokens=128, kv_heads=4))


class Stage:
    """Ranks that hold a case, and one process that holds what it is compared with. That is a rank, too: what has used
    CUDA cannot be forked.

    Args:
        seconds: for the times of a case.
    """

    def __init__(self, device: torch.device, sizes: Sizes, seconds: float) -> None:
        self.sizes, self.seconds = sizes, seconds
        self.ranks, self._one = RankPool(device), RankPool(device)
        self._of_one = {
            BLOCK: partial(_make_block, sizes.workload, CASES[PLAIN]),
            ATTENTION: partial(_make_attention, sizes.shape, "ring", 1),
        }

    def make(self, world: int, make: Callable[[int], Any]) -> RankPool:
        """The ranks, which hold what ``make`` gives, and can be asked about the numbers of one process."""
        if not self.ranks.inherited:
            of_attention, of_block = self.one(ATTENTION).ask("result")[0], self.one(BLOCK).ask("reference")[0]
            self.ranks.inherited = {ATTENTION: of_attention, BLOCK: of_block}
        self.ranks.hold(world, make)
        return self.ranks

    def one(self, kind: str) -> RankPool:
        """The one process, which holds the plain block, or the whole attention."""
        self._one.hold(1, self._of_one[kind])
        return self._one

    def times(self, kind: str) -> dict[str, float]:
        """Milliseconds of the ranks and of one process, and their ratio."""
        timed = {"ranks": partial(_slowest, self.ranks), "one": partial(_slowest, self.one(kind))}
        series = take_turns(timed, self.seconds)
        return {
            "ms": Spread.of(series["ranks"]).median * 1e3,
            "ms of one process": Spread.of(series["one"]).median * 1e3,
            "time / one process": common.ratio(series, "ranks", "one").median,
        }

    def close(self) -> None:
        self.ranks.close()
        self._one.close()


def cases(device: torch.device, budget: float) -> Iterator[Case]:
    tensor.load([CASES[name] for name in MODES])
    share = budget / (len(MODES) + len(SEQUENCES))
    stage = Stage(device, ON_GPU if device.type == "cuda" else ON_CPU, share / 2)
    for world in (2, 4, 8):
        for name in MODES:
            if CASES[name].world == world:
                yield Case(f"{BLOCK} {name}", partial(_block, stage, name), seconds=90)
        for mode, n in SEQUENCES:
            if n == world:
                yield Case(f"{ATTENTION} {mode} {n}", partial(_attention, stage, mode, n), seconds=90)
    stage.close()


def _slowest(ranks: RankPool, calls: int) -> float:
    return max(ranks.ask("block", calls))


def _make_block(workload: Workload, case: BlockCase, rank: int) -> Worker:
    return Worker(case, workload, True, rank)


def _make_attention(shape: Shape, mode: str, world: int, rank: int) -> AttentionCase:
    return AttentionCase(shape, mode, rank, world)


def _block(stage: Stage, name: str) -> Figures:
    case, workload = CASES[name], stage.sizes.workload
    ranks = stage.make(case.world, partial(_make_block, workload, case))
    gaps = ranks.ask("gaps", Inherited(BLOCK))
    for gap in gaps:
        tensor.check(name, gap)
    counted = ranks.ask("count")
    tensor.check_traffic(name, counted, block_traffic(case, workload))
    return {
        **stage.times(BLOCK),
        "off by": max(max(gap.values()) for gap in gaps),
        "MB sent": counted[0].bytes / MB,
        "MiB at most": _most(ranks.ask("peak")),
        "MiB of one process": _most(stage.one(BLOCK).ask("peak")),
    }


def _most(peaks: Sequence[int | None]) -> float | None:
    found = [peak for peak in peaks if peak is not None]
    return max(found) / 2**20 if found else None


def _attention(stage: Stage, mode: str, n: int) -> Figures:
    shape = stage.sizes.shape
    ranks = stage.make(n, partial(_make_attention, shape, mode, n))
    gap = max(ranks.ask("gap", Inherited(ATTENTION)))
    if not gap <= ATTENTION_TOLERANCE:
        raise AssertionError(f"output or gradients differ from one process by {gap:.3g} of their largest number")
    counted: list[Counted] = ranks.ask("count")
    formula = attention_traffic(
        shape.tokens * shape.batch, shape.heads, shape.kv_heads, shape.head_dim, **ring_and_ulysses(mode, n)
    )
    for rank, found in enumerate(counted):
        if (found.forward, found.backward) != (formula.forward, formula.backward):
            raise AssertionError(f"rank {rank} sent {found}, but the formula says {formula}")
    times = stage.times(ATTENTION)
    return {**times, "off by": gap, "MB sent": 4 * (counted[0].forward + counted[0].backward) / MB}
