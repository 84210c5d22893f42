"""Saving and loading beside torch.distributed.checkpoint, on the same tensors, with 2 ranks in one run.

    python -m benchmarks.checkpoints                     # weights and both moments of AdamW of a GPT, 350 MB
    python -m benchmarks.checkpoints --hidden 256 --layers 4 --folder /mnt/scratch

The tensors are those of 1D tensor parallelism, and those of data parallelism, which both ranks hold whole. Both flush
their files to the disk (torch does so by default). What was loaded is compared with what was saved, to the bit, before
the clock starts. ``other plan`` loads what was saved under 1D tensor parallelism with each weight split in its other
dim. ``stall`` is how long an asynchronous save keeps the step waiting; it is then waited for, outside of the clock, and
the saves before it have made the copies' memory.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.checkpoint_worker import Worker
from benchmarks.common import Series
from benchmarks.ranks import RankGroup

MB = 1e6
WORLD = 2
#: what is timed, in this order: a load finds what the save before it has written
OPERATIONS = ("save", "load", "load, other plan", "stall")


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.make_parser(__doc__, blocks=8)
    parser.add_argument("--hidden", type=int, default=512, help="hidden size of the GPT (default %(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="its layers (default %(default)s)")
    parser.add_argument("--vocab", type=int, default=8192, help="its vocabulary (default %(default)s)")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    arguments = parser.parse_args(argv)
    sizes = (arguments.hidden, arguments.layers, arguments.vocab)
    if arguments.smoke:
        sizes, arguments.blocks = (16, 2, 48), 2
    root = Path(tempfile.mkdtemp(prefix="colossus-benchmark-", dir=arguments.folder))
    try:
        results = [_run(plan, sizes, arguments.blocks, root) for plan in ("tensor", "data")]
    finally:
        shutil.rmtree(root, ignore_errors=True)
    common.write_json(arguments.json, {"sizes": sizes, "results": results})
    return 0


def _run(plan: str, sizes: tuple[int, int, int], blocks: int, root: Path) -> dict[str, Any]:
    groups = {name: _group(name, plan, sizes, root) for name in ("colossus", "torch")}
    try:
        for name, group in groups.items():
            common.progress(f"{plan}: {name}: comparing")
            group.call("check")
        series: dict[str, Series] = {
            operation: common.alternate(
                {name: partial(group.slowest, "time", operation) for name, group in groups.items()},
                blocks,
                label=f"{plan}: {operation}:",
            )
            for operation in OPERATIONS
        }
        num_bytes = sum(groups["colossus"].call("num_bytes"))
    finally:
        for group in groups.values():
            group.close()
    peaks = {name: _peaks(name, plan, sizes, root) for name in groups}
    _report(plan, num_bytes, series, peaks)
    return {"plan": plan, "bytes": num_bytes, "seconds": series, "peak_bytes": peaks}


def _group(name: str, plan: str, sizes: tuple[int, int, int], root: Path) -> RankGroup:
    return RankGroup(f"{plan} {name}", WORLD, partial(Worker, name, plan, sizes, root))


def _peaks(name: str, plan: str, sizes: tuple[int, int, int], root: Path) -> dict[str, int | None]:
    """Return the bytes that each operation adds to a rank that has not run another one."""
    return {op: _group(name, plan, sizes, root).peak_of("peak", op) for op in OPERATIONS}


def _report(plan: str, num_bytes: int, series: dict[str, Series], peaks: dict[str, dict[str, int | None]]) -> None:
    rows = []
    for operation, seconds in series.items():
        ours, theirs = (common.Spread.of(seconds[name]).median for name in ("colossus", "torch"))
        more = [_mb(peaks[name][operation]) for name in ("colossus", "torch")]
        rows.append([operation, f"{ours:.3f}", f"{theirs:.3f}", str(common.ratio(seconds, "colossus", "torch")), *more])
    common.print_table(
        f"{plan} {WORLD}: {num_bytes / MB:.0f} MB",
        ["", "colossus s", "torch s", "ratio", "adds MB", "torch adds MB"],
        rows,
    )
    within = {name: {key: series[key][name] for key in series} for name in ("colossus", "torch")}
    for over, under in (("stall", "save"), ("load, other plan", "load")):
        ratios = [f"{name} {common.ratio(series_of, over, under)}" for name, series_of in within.items()]
        print(f"  {over} / {under}: {', '.join(ratios)}")


def _mb(num_bytes: int | None) -> str:
    return "N/A" if num_bytes is None else f"{num_bytes / MB:.1f}"


if __name__ == "__main__":
    sys.exit(main())
