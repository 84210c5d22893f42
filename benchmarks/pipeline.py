"""A pipeline of colossus against torch.distributed.pipelining and one process, on the same modules, split alike.

    python -m benchmarks.pipeline                            # all sizes
    python -m benchmarks.pipeline --hidden 64 --setups 2x4    # 2 stages, 4 microbatches

*passes* are forward and backward of all microbatches, nothing else (torch's ``schedule.step``); *step* is a whole
training step: also clipping by the global norm, fused AdamW, loss and norm read on every rank. Before the clock starts,
losses and every gradient of every case must agree with those of one process, and so must the first steps.
"""

from __future__ import annotations

import argparse
import gc
import importlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.common import Series, Spread
from benchmarks.pipeline_cases import CASES, SERIAL, TORCH, Gradients, Setup, Worker
from benchmarks.ranks import RankGroup
from benchmarks.workload import Workload

LOSS_TOLERANCE, GRADIENT_TOLERANCE, STEP_TOLERANCE = 1e-6, 1e-5, 1e-5
CHECKED_STEPS = 3
MEASURED = ("passes", "step")
SETUPS = ("2x4", "2x8", "4x8")
MAX_STEPS = 10


@dataclass(frozen=True)
class Result:
    """All that was measured of one setup.

    Attributes:
        series: "passes" or "step" -> case -> seconds by block.
        processor: the same for processor seconds, summed over the ranks.
        differences: case -> the largest relative difference of a gradient from that of one process.
    """

    setup: Setup
    series: dict[str, Series]
    processor: dict[str, Series]
    differences: dict[str, float]


# -- refusals -------------------------------------------------------------------------------------------------


def check_passes(label: str, by_rank: Sequence[tuple[float, Gradients]], reference: tuple[float, Gradients]) -> float:
    """Compare the losses and gradients of the ranks of a case with those of one process.

    Returns:
        The largest difference of a gradient from the reference, as norms of the whole parameter.

    Raises:
        RuntimeError: the name and the size of the largest difference.
    """
    wanted_loss, wanted = reference
    total = sum(loss for loss, _ in by_rank)
    if not abs(total - wanted_loss) <= LOSS_TOLERANCE * abs(wanted_loss):
        raise RuntimeError(f"{label}: the sum of losses is {total!r}, but {SERIAL} has {wanted_loss!r}")
    gradients = {name: value for _, own in by_rank for name, value in own.items()}
    if gradients.keys() != wanted.keys():
        raise RuntimeError(f"{label}: gradients of other parameters: {sorted(gradients.keys() ^ wanted.keys())}")
    differences = {
        name: float(np.linalg.norm(gradients[name] - value) / np.linalg.norm(value)) for name, value in wanted.items()
    }
    worst = max(
        differences, key=lambda name: differences[name] if differences[name] == differences[name] else float("inf")
    )
    if not differences[worst] <= GRADIENT_TOLERANCE:
        raise RuntimeError(
            f"{label}: the gradient of {worst} differs from that of {SERIAL} by {differences[worst]:.3g}"
        )
    return differences[worst]


# -- measuring ------------------------------------------------------------------------------------------------


def measure(setup: Setup, names: Sequence[str], blocks: int, steps: int | None = None) -> Result:
    """Run the named cases, that in one process always.

    Args:
        steps: in a block; None: so many that the block of one process takes about a second.
    """
    if SERIAL not in names:
        names = (SERIAL, *names)
    labels = common.unique_labels(names)
    with ExitStack() as stack:
        groups: dict[str, RankGroup] = {}
        for label, name in labels.items():
            common.progress(f"building {label}")
            case = CASES[name]
            made = RankGroup(label, case.world(setup), partial(Worker, case, setup))
            groups[label] = stack.enter_context(made)
        reference = groups[SERIAL].call("passes")[0]
        differences = {label: check_passes(label, group.call("passes"), reference) for label, group in groups.items()}
        trajectories = {label: group.call("steps", CHECKED_STEPS) for label, group in groups.items()}
        for label, of_ranks in trajectories.items():
            for trajectory in of_ranks:
                common.check_trajectory(label, trajectory, trajectories[SERIAL][0], SERIAL, STEP_TOLERANCE)
        steps = steps or max(1, min(MAX_STEPS, round(1.0 / _block(groups[SERIAL], "passes", 1, []))))
        series, processor = {}, {}
        for what in MEASURED:
            busy: Series = {label: [] for label in groups}
            runners = {label: partial(_block, group, what, steps, busy[label]) for label, group in groups.items()}
            series[what] = common.alternate(runners, blocks, label=f"{setup}: {what},")
            processor[what] = busy
    return Result(setup, series, processor, differences)


def _block(group: RankGroup, what: str, steps: int, busy: list[float]) -> float:
    """Return the seconds of the slowest rank; processor seconds of all go into the list."""
    times = group.call("block", what, steps)
    busy.append(sum(used for _, used in times))
    return max(seconds for seconds, _ in times)


# -- results --------------------------------------------------------------------------------------------------


def ratios(result: Result, what: str, label: str) -> dict[str, Spread]:
    """Return the time of a case over that of the serial one and of torch's."""
    series = result.series[what]
    return {peer: common.ratio(series, label, peer) for peer in (SERIAL, TORCH) if peer in series and peer != label}


def report(result: Result) -> None:
    """Print a table for passes and one for steps."""
    for what in MEASURED:
        rows = []
        for label, seconds in result.series[what].items():
            of_peers = ratios(result, what, label)
            rows.append(
                (
                    label,
                    f"{Spread.of(seconds).median * 1e3:.1f}",
                    f"{min(seconds) * 1e3:.1f}",
                    *(of_peers.get(peer, "") for peer in (SERIAL, TORCH)),
                    f"{Spread.of(result.processor[what][label]).median * 1e3:.1f}",
                )
            )
        header = ("case", "ms", "fastest", f"time / {SERIAL}", f"time / {TORCH}", "processor ms")
        common.print_table(f"{what}: {result.setup}; {len(seconds)} blocks", header, rows)
    print("  median [quartiles] over blocks, ratios within a block; processor time: of all ranks together")
    print(f"  largest relative difference of a gradient: {max(result.differences.values()):.1e}")


def as_json(result: Result) -> dict[str, Any]:
    return {
        "setup": asdict(result.setup),
        "seconds": result.series,
        "processor_seconds": result.processor,
        "ratios": {
            what: {
                label: {peer: asdict(spread) for peer, spread in ratios(result, what, label).items()} for label in of
            }
            for what, of in result.series.items()
        },
        "gradient_differences": result.differences,
    }


# -- the command ----------------------------------------------------------------------------------------------

SMOKE = Workload(hidden=32, layers=4, heads=4, tokens=16, batch=1, vocab=32)


def sizes(hidden: int) -> Workload:
    """Return the two sizes of the tables; ``batch`` is that of a microbatch."""
    if hidden >= 512:
        return Workload(hidden=hidden, layers=8, heads=8, tokens=128, batch=2)
    return Workload(hidden=hidden, layers=8, heads=4, tokens=64, batch=2)


def setup_of(sample: Workload, words: str) -> Setup:
    """``2x4``: 2 stages, 4 microbatches.

    Raises:
        argparse.ArgumentTypeError: for anything else.
    """
    try:
        stages, microbatches = map(int, words.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{words!r} is not STAGESxMICROBATCHES, 2x4 say") from None
    of = Workload(**{**asdict(sample), "batch": sample.batch * microbatches})
    return Setup(of, stages, microbatches)


def load() -> None:
    """Import what ranks would import each for themselves, before they are forked."""
    importlib.import_module("torch._dynamo")  # every optimizer and backward want it
    gc.freeze()  # collections on the ranks need not walk through it all


def make_parser() -> argparse.ArgumentParser:
    parser = common.make_parser(__doc__, blocks=10)
    parser.add_argument("--hidden", type=int, nargs="+", default=[512, 64], help="hidden sizes (default 512 64)")
    parser.add_argument(
        "--setups", nargs="+", default=SETUPS, metavar="SxM", help=f"stages x microbatches (default {' '.join(SETUPS)})"
    )
    parser.add_argument("--steps-per-block", type=int, help="timed steps in a block (default: about a second's)")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), help="(default: all)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    samples = [SMOKE] if arguments.smoke else [sizes(hidden) for hidden in arguments.hidden]
    words = ("2x3",) if arguments.smoke else arguments.setups
    blocks, steps = (2, 1) if arguments.smoke else (arguments.blocks, arguments.steps_per_block)
    try:
        setups = [setup_of(sample, word) for sample in samples for word in words]
    except argparse.ArgumentTypeError as error:
        parser.error(f"--setups: {error}")
    load()
    results: list[Mapping[str, Any]] = []
    for setup in setups:
        result = measure(setup, arguments.cases, blocks, steps)
        report(result)
        results.append(as_json(result))
    common.write_json(arguments.json, {"results": results})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
