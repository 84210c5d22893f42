"""One training step (forward, backward, clip, AdamW) in torch alone and in colossus, serial and on several ranks.

    python -m benchmarks.train_step                      # both sizes, all cases
    python -m benchmarks.train_step --hidden 64 --cases serial serial megatron-2 colossus-tensor-2

All cases are alive at once and take turns, one thread per rank; before the clock starts each must show the losses and
gradient norms of the serial case on the first steps. A case named twice is the same code against itself: the noise.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks import common, memory
from benchmarks.cases import KINDS, REFERENCE, TOLERANCE, Case, Kind
from benchmarks.common import Series, Spread
from benchmarks.memory import Memory
from benchmarks.ranks import RankGroup
from benchmarks.timing import PeakOnDevice, seconds_per_call
from benchmarks.workload import Workload
from colossus.monitor.mfu import device_peak

DEFAULT_CASES = (REFERENCE, *(name for name, kind in KINDS.items() if kind.in_default))
SMOKE_CASES = tuple(name for name in DEFAULT_CASES if KINDS[name].world <= 2)
CHECKED_STEPS = 4

#: per step (loss, gradient norm)
Trajectory = list[tuple[float, float]]


class Worker:
    """A case on one rank. The first step of a block is not timed: caches hold what another case left there."""

    def __init__(self, kind: Kind, workload: Workload, rank: int) -> None:
        self.case: Case = kind.build(workload, rank)
        self.device = torch.device(workload.device)
        self.done = 0
        self.peak = device_peak(torch.device(workload.device), kind.precision)

    def steps(self, count: int) -> Trajectory:
        out = [self.case.step(self.done + index) for index in range(count)]
        self.done += count
        return out

    def peak_flops(self) -> float | None:
        """Return the peak of this rank's device in FLOP/s."""
        return self.peak

    def block(self, count: int) -> float:
        """Return the seconds of a step."""
        if self.device.type == "cuda":  # no loss is read while the clock runs
            run: Any = self.case
            return seconds_per_call(partial(run.run, 0), self.device, count)
        self.steps(1)
        begin = time.perf_counter()
        self.steps(count)
        return (time.perf_counter() - begin) / count


class MemoryWorker:
    def __init__(self, kind: Kind, workload: Workload, rank: int) -> None:
        self.build, self.device = partial(kind.build, workload, rank), torch.device(workload.device)

    def measure(self) -> Memory | None:
        if self.device.type != "cuda":
            return memory.measure(self.build)
        with PeakOnDevice(self.device) as peak:
            case = self.build()
            for index in range(CHECKED_STEPS):
                case.step(index)
        return Memory(torch.cuda.memory_allocated(self.device), peak.bytes or 0)


@dataclass(frozen=True)
class Result:
    """All that was measured at one size.

    Attributes:
        peaks: of the device of each case, in FLOP/s, where it is known.
    """

    workload: Workload
    series: Series
    trajectories: dict[str, Trajectory]
    memories: dict[str, Memory]
    peaks: dict[str, float]

    def utilisation(self, label: str) -> float | None:
        """Return the model FLOP utilisation: operations of a step over those that its device could do."""
        if label not in self.peaks:
            return None
        return self.workload.flops / Spread.of(self.series[label]).median / self.peaks[label]

    def comparisons(self) -> list[tuple[str, str, Spread]]:
        """Return every case against its peers, and every second run of the same code against the first."""
        pairs = []
        for label in self.series:
            name = label.removesuffix(common.AGAIN)
            against = (name,) if name != label else KINDS[name].peers
            pairs += [(label, peer) for peer in against if peer in self.series]
        return [(name, peer, common.ratio(self.series, name, peer)) for name, peer in pairs]


def check(trajectories: Mapping[str, Trajectory], reference: str = REFERENCE) -> None:
    """Raise RuntimeError unless all cases compute the same thing.

    Args:
        reference: the one against which cases of no `Kind` are held.

    Raises:
        RuntimeError: the first case and step that differ from the serial one of the same precision.
    """
    for name, trajectory in trajectories.items():
        kind = KINDS.get(name.removesuffix(common.AGAIN))
        against, tolerance = (kind.reference, kind.tolerance) if kind is not None else (reference, TOLERANCE)
        common.check_trajectory(name, trajectory, trajectories[against], against, tolerance)


def measure(workload: Workload, names: Sequence[str], blocks: int, steps: int, *, with_memory: bool = True) -> Result:
    """Run the named cases (the serial one always, and that of their precision) at one size."""
    references = dict.fromkeys((REFERENCE, *(KINDS[name].reference for name in names)))
    names = (*(name for name in references if name not in names), *names)
    labels = common.unique_labels(names)
    memories: dict[str, Memory] = {}
    with ExitStack() as stack:
        groups: dict[str, RankGroup] = {}
        importlib.import_module("torch._dynamo")  # every optimizer imports it: here once, instead of on each rank
        for name in names:
            KINDS[name].load()
        for label, name in labels.items():
            common.progress(f"building {label}")
            kind = KINDS[name]
            groups[label] = stack.enter_context(RankGroup(label, kind.world, partial(Worker, kind, workload)))
        trajectories = {label: group.call("steps", CHECKED_STEPS)[0] for label, group in groups.items()}
        check(trajectories)
        flops = {label: group.call("peak_flops")[0] for label, group in groups.items()}
        peaks = {label: peak * KINDS[labels[label]].world for label, peak in flops.items() if peak is not None}
        runners = {label: partial(group.slowest, "block", steps) for label, group in groups.items()}
        series = common.alternate(runners, blocks, label=f"hidden {workload.hidden}:")
    for name in dict.fromkeys(labels.values()) if with_memory else ():
        common.progress(f"memory of {name}")
        kind = KINDS[name]
        with RankGroup(name, kind.world, partial(MemoryWorker, kind, workload)) as group:
            measured = [used for used in group.call("measure") if used is not None]
            if measured:
                memories[name] = max(measured, key=lambda used: used.peak)
    common.progress("")
    return Result(workload, series, trajectories, memories, peaks)


def report(result: Result, *, title: str = "") -> None:
    """Print the tables."""
    rows = []
    for label, seconds in result.series.items():
        used = result.memories.get(label)
        rows.append(
            (
                label,
                f"{Spread.of(seconds).median * 1e3:.2f}",
                common.ratio(result.series, label, REFERENCE),
                f"{used.resident / 2**20:.1f}" if used else "",
                f"{used.peak / 2**20:.1f}" if used else "",
                f"{mfu:.1%}" if (mfu := result.utilisation(label)) is not None else "N/A",
            )
        )
    header = ("case", "ms/step", "time / serial", "resident MB", "peak MB", "MFU")
    blocks = len(result.series[REFERENCE])
    common.print_table(f"{title}{result.workload}; {blocks} blocks", header, rows)
    print("  time / serial: median [quartiles] of the ratio in each block; memory: tensors of the largest rank")
    compared = [(name, peer, spread) for name, peer, spread in result.comparisons()]
    if compared:
        common.print_table("compared in the same blocks", ("case", "against", "time ratio"), compared)


def as_json(result: Result) -> dict[str, Any]:
    return {
        "workload": asdict(result.workload),
        "seconds_per_step": result.series,
        "time_over_serial": {name: asdict(common.ratio(result.series, name, REFERENCE)) for name in result.series},
        "comparisons": [
            {"case": name, "against": peer, **asdict(spread)} for name, peer, spread in result.comparisons()
        ],
        "loss_and_norm": result.trajectories,
        "utilisation": {name: mfu for name in result.series if (mfu := result.utilisation(name)) is not None},
        "memory_bytes": {name: asdict(used) for name, used in result.memories.items()},
    }


def sizes(hidden: int) -> Workload:
    """Return the two sizes of the tables, and others alike; of 1024 and more one that fills a GPU."""
    if hidden >= 1024:
        return Workload(hidden=hidden, layers=8, heads=hidden // 128, tokens=1024, batch=16, vocab=32768)
    return Workload(hidden=hidden, heads=8 if hidden >= 512 else 4)


SMOKE = Workload(hidden=32, layers=1, heads=4, tokens=16, batch=4, vocab=32)


def make_parser(description: str | None, *, blocks: int) -> argparse.ArgumentParser:
    """Return a parser with the options of benchmarks that train."""
    parser = common.make_parser(description, blocks=blocks)
    parser.add_argument("--hidden", type=int, nargs="+", default=[512, 64], help="hidden sizes (default 512 64)")
    parser.add_argument("--steps-per-block", type=int, help="timed steps in a block (default 2, at hidden < 256 20)")
    parser.add_argument("--no-memory", action="store_true", help="times only")
    return parser


def run(arguments: argparse.Namespace, names: Sequence[str], *, title: str = "", device: str = "cpu") -> int:
    """Measure, print and write what the parsed arguments ask for."""
    results = []
    for workload in [SMOKE] if arguments.smoke else [sizes(hidden) for hidden in arguments.hidden]:
        workload = replace(workload, device=device)
        steps = arguments.steps_per_block or (2 if workload.hidden >= 256 else 20)
        blocks, steps = (2, 1) if arguments.smoke else (arguments.blocks, steps)
        result = measure(workload, names, blocks, steps, with_memory=not arguments.no_memory)
        report(result, title=title)
        results.append(as_json(result))
    common.write_json(arguments.json, {"results": results})
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, blocks=15)
    parser.add_argument(
        "--cases", nargs="+", choices=list(KINDS), metavar="CASE",
        help=f"from: {', '.join(KINDS)} (default: all, serial twice; with --smoke up to 2 ranks)",
    )  # fmt: skip
    arguments = parser.parse_args(argv)
    return run(arguments, arguments.cases or (SMOKE_CASES if arguments.smoke else DEFAULT_CASES))


if __name__ == "__main__":
    raise SystemExit(main())
