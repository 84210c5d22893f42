"""One transformer block, forward and backward, in every tensor mode: time, bytes sent, memory, per rank.

    python -m benchmarks.tensor                                   # every mode on 2, 4 and 8 ranks
    python -m benchmarks.tensor --worlds 4                        # what 4 ranks can do
    python -m benchmarks.tensor --hidden 192 --heads 6 --worlds 6 # a rectangle of 2 x 3 needs sizes that divide by 6
    python -m benchmarks.tensor --cases 1d-8 2d-2x2 3d-2x2x2-keep

Before the clock starts each case must give the output, the gradient of the input and all gradients of parameters of the
one-process block, and must send just what the formula of `colossus.tensor_parallel.traffic` says; else the run stops.
A case named twice is the same code against itself: the noise.

Names: mode, ranks along each axis, and ``keep`` where x stays as gathered for backward and weights are gathered once
per microbatch; without it both are gathered again in backward. 1d-sequence splits activations between blocks by tokens,
2.5d has two copies of a 2 x 2 grid, dtensor is torch's parallelize_module.
"""

from __future__ import annotations

import argparse
import gc
import importlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks import common
from benchmarks.common import Series
from benchmarks.ranks import RankGroup
from benchmarks.tensor_block import Counted
from benchmarks.tensor_cases import CASES, DTENSOR, PLAIN, Case, block_traffic, gathers_weights, unfit_reason
from benchmarks.tensor_report import ITEM, MB, Bench, Result, Scoped, as_json, report
from benchmarks.tensor_worker import Values, Worker
from benchmarks.workload import Workload
from colossus.comm.accounting import Traffic
from colossus.tensor_parallel.gathered_weights import SCOPES

TOLERANCE = 1e-4
DEFAULT_CASES = (PLAIN, *CASES)
SMOKE_CASES = (PLAIN, PLAIN, "1d-2", "1d-sequence-2", "2d-2x2", "2.5d-2x2x2", "3d-2x2x2", "dtensor-2")
SMOKE = Workload(hidden=24, layers=1, heads=6, tokens=6, batch=8, vocab=1)


def make_group(bench: Bench, label: str, case: Case) -> RankGroup:
    return RankGroup(label, case.world, partial(Worker, case, bench.workload, bench.use_shared_memory))


# -- refusals -------------------------------------------------------------------------------------------------


def check(label: str, gaps: Mapping[str, float]) -> None:
    """Raise RuntimeError unless a case computes what the one-process block does.

    Raises:
        RuntimeError: what differs most, and by how much.
    """
    worst = max(gaps, key=lambda what: gaps[what] if gaps[what] == gaps[what] else float("inf"))
    if not gaps[worst] <= TOLERANCE:
        raise RuntimeError(
            f"{label}: the {worst} differs from that of {PLAIN} by {gaps[worst]:.3g} of its largest value"
        )


def check_traffic(label: str, counted: Sequence[Counted], formula: Traffic) -> None:
    """Raise RuntimeError unless every rank has counted what the formula says.

    Raises:
        RuntimeError: both numbers.
    """
    said = formula.elements * ITEM
    for rank, sent in enumerate(counted):
        if sent.calls != formula.calls or abs(sent.bytes - said) > 1e-9 * said:
            raise RuntimeError(
                f"{label}: rank {rank} sent {sent.bytes / MB:.6f} MB in {sent.calls} calls, but the formula says "
                f"{said / MB:.6f} MB in {formula.calls}"
            )


# -- measuring ------------------------------------------------------------------------------------------------


def load(cases: Collection[Case]) -> None:
    """Import what ranks would import each for themselves, before they are forked."""
    importlib.import_module("torch._dynamo")  # backward wants it
    if any(case.mode == DTENSOR for case in cases):
        importlib.import_module("benchmarks.peers.dtensor")
    gc.freeze()  # collections on the ranks need not walk through it all


def measure(bench: Bench, labels: Mapping[str, Case], *, with_memory: bool = True) -> dict[str, Result]:
    """Return what was measured by label; cases on as many ranks take turns with the one-process block."""
    single = {label: case for label, case in labels.items() if case.world == 1}
    results: dict[str, Result] = {}
    for world in sorted({case.world for case in labels.values()} - {1}) or [1]:
        together = {**single, **{label: case for label, case in labels.items() if case.world == world}}
        _take_turns(bench, together, results)
    for case in dict.fromkeys(labels.values()) if with_memory else ():
        common.progress(f"memory of {case.name}")
        with make_group(bench, case.name, case) as group:
            peaks = [peak for peak in group.call("peak") if peak is not None]
        for result in results.values():
            if result.case == case:
                result.peak = max(peaks, default=None)
    common.progress("")
    return {label: results[label] for label in labels}


def _take_turns(bench: Bench, labels: Mapping[str, Case], results: dict[str, Result]) -> None:
    with ExitStack() as stack:
        groups: dict[str, RankGroup] = {}
        reference: Values = {}
        for label, case in labels.items():
            common.progress(f"building {label}")
            group = groups[label] = stack.enter_context(make_group(bench, label, case))
            reference = reference or groups[PLAIN].call("reference")[0]
            results.setdefault(label, _prepare(bench, label, case, group, reference))
        runners = {label: partial(group.slowest, "block", bench.steps) for label, group in groups.items()}
        world = max(case.world for case in labels.values())
        series: Series = common.alternate(runners, bench.blocks, label=f"{world} ranks:")
    for label, seconds in series.items():
        results[label].seconds += seconds
        results[label].ratios += [a / b for a, b in zip(seconds, series[PLAIN], strict=True)]


def _prepare(bench: Bench, label: str, case: Case, group: RankGroup, reference: Values) -> Result:
    """Measure everything but times; values and bytes sent are checked."""
    for gaps in group.call("gaps", reference):
        check(label, gaps)
    formula = block_traffic(case, bench.workload) if case.is_ours else None
    counted = group.call("count")
    if formula is not None:
        check_traffic(label, counted, formula)
    return Result(
        case, counted[0], formula, group.call("owed")[0], max(group.call("saved")), max(group.call("num_parameters")),
        scopes=_scopes(bench, label, case, group),
    )  # fmt: skip


def _scopes(bench: Bench, label: str, case: Case, group: RankGroup) -> dict[str, Scoped]:
    """Return what a step sends by scope of weights, where that makes a difference; it is compared with the formula."""
    scopes = {}
    for scope in SCOPES if bench.microbatches and gathers_weights(case, bench.workload) else ():
        formula = block_traffic(replace(case, weights=scope), bench.workload, bench.microbatches)
        counted = group.call("count_step", bench.microbatches, scope)
        check_traffic(f"{label}, {bench.microbatches} microbatches, weights {scope}", counted, formula)
        scopes[scope] = Scoped(counted[0], formula)
    return scopes


# -- the command ----------------------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    parser = common.make_parser(__doc__, blocks=10)
    for name, default in (("hidden", 512), ("heads", 8), ("tokens", 128), ("batch", 16)):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help="(default %(default)s)")
    parser.add_argument(
        "--cases", nargs="+", choices=list(CASES), metavar="CASE",
        help=f"from: {', '.join(CASES)} (default: all, plain twice; with --smoke one of each mode)",
    )  # fmt: skip
    worlds = sorted({case.world for case in CASES.values()} - {1})
    parser.add_argument(
        "--worlds", type=int, nargs="+", choices=worlds, metavar="N",
        help=f"only cases on so many ranks, from: {', '.join(map(str, worlds))}",
    )  # fmt: skip
    parser.add_argument("--device", default="cpu", help="of all ranks: cpu (default) or cuda, which they share")
    parser.add_argument("--steps-per-block", type=int, help="timed steps in a block (default 2, at hidden < 256 20)")
    parser.add_argument(
        "--microbatches", type=int, default=8, metavar="N",
        help="a second table: what a step of N microbatches sends by scope of weights (default %(default)s, 0: none)",
    )  # fmt: skip
    parser.add_argument("--no-memory", action="store_true", help="leave out peak MB, for which cases are built again")
    parser.add_argument(
        "--no-shared-memory", action="store_true", help="colossus through gloo, as DTensor is, between ranks of a host"
    )
    return parser


def choose(arguments: argparse.Namespace, workload: Workload) -> tuple[dict[str, Case], dict[str, str]]:
    """Return the cases to run by label, the one-process block always, and by name why a case is skipped."""
    names = arguments.cases or (SMOKE_CASES if arguments.smoke else DEFAULT_CASES)
    if arguments.worlds:
        names = [name for name in names if CASES[name].world in (1, *arguments.worlds)]
    reasons = {name: unfit_reason(CASES[name], workload) for name in dict.fromkeys(names)}
    skipped = {name: reason for name, reason in reasons.items() if reason}
    chosen = [name for name in names if name not in skipped]
    if PLAIN not in chosen:
        chosen = [PLAIN, *chosen]
    return {label: CASES[name] for label, name in common.unique_labels(chosen).items()}, skipped


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    a = arguments
    sizes: dict[str, Any] = dict(hidden=a.hidden, heads=a.heads, tokens=a.tokens, batch=a.batch, device=a.device)
    workload = Workload(layers=1, vocab=1, **sizes)
    steps, blocks, microbatches = a.steps_per_block or (2 if a.hidden >= 256 else 20), a.blocks, a.microbatches
    if a.smoke:
        workload, steps, blocks, microbatches = replace(SMOKE, device=a.device), 1, 2, min(2, microbatches)
    if workload.hidden % workload.heads:
        parser.error(f"--hidden {workload.hidden} does not divide into --heads {workload.heads}")
    labels, skipped = choose(arguments, workload)
    bench = Bench(workload, blocks, steps, microbatches, use_shared_memory=not a.no_shared_memory)
    load(labels.values())
    results = measure(bench, labels, with_memory=not a.no_memory)
    report(bench, results)
    for reason in dict.fromkeys(skipped.values()):
        print(f"\nskipped {', '.join(name for name in skipped if skipped[name] == reason)}: {reason}")
    common.write_json(a.json, as_json(bench, results, skipped))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
