"""Results of the tensor-mode benchmark as tables, JSON and bars."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks import common
from benchmarks.common import Spread
from benchmarks.tensor_block import Counted, Owed
from benchmarks.tensor_cases import Case
from benchmarks.workload import Workload
from colossus.comm.accounting import Traffic

MB = 1e6
ITEM = 4  # bytes of a float32


@dataclass(frozen=True)
class Bench:
    """Sizes and ways of one run of this script."""

    workload: Workload
    blocks: int
    steps: int
    microbatches: int
    use_shared_memory: bool = True


@dataclass
class Result:
    """All that was measured of a case; bytes are those of the rank that has most."""

    case: Case
    counted: Counted
    formula: Traffic | None
    owed: Owed
    saved: int
    parameters: int
    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    peak: int | None = None
    scopes: dict[str, Scoped] = field(default_factory=dict)


@dataclass(frozen=True)
class Scoped:
    """Bytes and calls of a step of some microbatches under one scope of weights."""

    counted: Counted
    formula: Traffic


HEADER = (
    "case", "ms", "time / plain", "MB sent", "formula", "calls", "formula", "depth sum", "other sums", "saved MB",
    "peak MB", "parameters",
)  # fmt: skip
LEGEND = """\
  per rank, MB = 10^6 bytes; times: median [quartiles] over blocks, of the slowest rank
  MB sent, calls: forward and backward, as the ring algorithm sends; formula: of
  colossus.tensor_parallel.traffic, for our cases
  depth sum, other sums: MB once a step, to sum gradients of weights (over the copies of 2.5d), of biases and norms
  saved MB: what forward keeps for backward, without the stored parameters; peak MB: all, within forward and backward,
  without the slots of shared memory (16 MiB of each rank in each of its groups, for any block)"""


def report(bench: Bench, results: Mapping[str, Result]) -> None:
    """Print the tables."""
    w = bench.workload
    title = f"hidden {w.hidden}, {w.heads} heads, {w.tokens} tokens, batch {w.batch}, fp32"
    common.print_table(
        f"one block: {title}; {bench.blocks} blocks", HEADER, [_row(label, r) for label, r in results.items()]
    )
    print(LEGEND)
    rows = [
        (label, scope, _mb(s.counted.bytes), _mb(s.formula.elements * ITEM), s.counted.calls, s.formula.calls)
        for label, r in results.items()
        for scope, s in r.scopes.items()
    ]
    if rows:
        header = ("case", "weights", "MB sent", "formula", "calls", "formula")
        common.print_table(
            f"a step of {bench.microbatches} microbatches of {w.batch}, by scope of weights", header, rows
        )
        print("  keep: x stays as gathered, under every scope")


def _row(label: str, r: Result) -> tuple[object, ...]:
    spread = Spread.of([seconds * 1e3 for seconds in r.seconds])
    return (
        label,
        f"{spread.median:.1f} [{spread.low:.1f}, {spread.high:.1f}]",
        Spread.of(r.ratios),
        _mb(r.counted.bytes),
        _mb(r.formula.elements * ITEM) if r.formula else "",
        r.counted.calls,
        r.formula.calls if r.formula else "",
        _mb(r.owed.matrices) if r.owed.matrices else "",
        _mb(r.owed.vectors, 3) if r.owed.vectors else "",
        _mb(r.saved, 1),
        _mb(r.peak, 1) if r.peak is not None else "",
        f"{r.parameters:,}",
    )


def _mb(count: float, digits: int = 2) -> str:
    return f"{count / MB:.{digits}f}"


def as_json(bench: Bench, results: Mapping[str, Result], skipped: Mapping[str, str]) -> dict[str, Any]:
    return {
        **asdict(bench),
        "cases": {label: _case_as_json(result) for label, result in results.items()},
        "skipped": dict(skipped),
    }


def _case_as_json(r: Result) -> dict[str, Any]:
    return {
        **asdict(r),
        "ranks": r.case.world,
        "milliseconds": asdict(Spread.of([seconds * 1e3 for seconds in r.seconds])),
        "time_over_plain": asdict(Spread.of(r.ratios)),
        "formula": _as_counted(r.formula) if r.formula else None,
        "scopes": {
            scope: {"counted": asdict(sent.counted), "formula": _as_counted(sent.formula)}
            for scope, sent in r.scopes.items()
        },
    }


def _as_counted(traffic: Traffic) -> dict[str, Any]:
    return asdict(Counted(traffic.calls, traffic.elements * ITEM))
