"""``colossus doctor --measure``: the speed of devices and links of this machine while all ranks work."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import torch

import colossus
from colossus.arithmetic import aligned, byte_count, counted
from colossus.config import ConfigError
from colossus.context.local_ranks import RanksFailed, run_local_ranks
from colossus.doctor.device_timing import OPERATORS
from colossus.doctor.network import rank_options
from colossus.doctor.rank_timing import Seconds, group_sizes, time_cases
from colossus.doctor.step_timing import calibrated
from colossus.doctor.timing_sizes import ON_CPU, ON_CUDA, Sizes
from colossus.hardware.hardware import OPERATIONS, ranks_at_once
from colossus.hardware.measured import (
    VERSION,
    AttentionTable,
    CollectiveTable,
    MeasuredFile,
    ProductTable,
)
from colossus.machine import memory_bytes, processor_name, threads_per_rank, usable_cores

TIMEOUT = 60.0


def run(nproc: int = 2, measure: str = "") -> int:
    """Measure, print tables, and write the file ``measure`` if one is named.

    Returns:
        0, or 1 when ranks failed.

    Raises:
        ConfigError: the file cannot be written; raised before anything is measured.
    """
    path = Path(measure) if measure else None
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ConfigError(f"--measure {measure}: {'is a folder' if path.is_dir() else f'no folder {path.parent}'}")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cuda = gpus >= nproc
    if 0 < gpus < nproc:
        print(f"{nproc} ranks, but {counted(gpus, 'GPU')}: measured on CPUs; use --nproc {gpus}", file=sys.stderr)
    try:
        results = measure_ranks(nproc, "cuda" if cuda else "cpu", ON_CUDA if cuda else ON_CPU)
    except RanksFailed as error:
        print(f"colossus: nothing was measured: {error}", file=sys.stderr)
        return 1
    print(tables(results))
    if path is not None:
        path.write_text(results.model_dump_json(indent=1) + "\n")
        print(f"\nwritten to {path}")
    return 0


def measure_ranks(nproc: int, device: str, sizes: Sizes) -> MeasuredFile:
    """Measure ``nproc`` ranks of this machine at the same time; each case has the slowest rank's time.

    Args:
        device: ``cpu`` or ``cuda``.

    Raises:
        RanksFailed: ranks fail, or nothing moves for a minute.
    """
    sys.stdout.flush()  # forked ranks would print the buffer again
    cuda = device == "cuda"
    setting = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(setting) if setting.isdecimal() else threads_per_rank(nproc)
    at_once = None if cuda else ranks_at_once(usable_cores(), threads)
    time_rank = partial(time_cases, nproc, threads, at_once, device, sizes)
    of_ranks = run_local_ranks(nproc, time_rank, **rank_options(cuda, TIMEOUT))
    slowest: Seconds = {}
    for of_rank in of_ranks:
        for case, seconds in of_rank.items():
            slowest[case] = max(seconds, slowest.get(case, 0.0))
    file = MeasuredFile(
        version=VERSION,
        colossus=colossus.__version__,
        torch=torch.__version__,
        device=device,
        name=torch.cuda.get_device_name(0) if cuda else processor_name(),
        cores=usable_cores(),
        ranks=nproc,
        threads=threads,
        backend="nccl" if cuda else "gloo",
        memory_bytes=torch.cuda.mem_get_info(0)[1] if cuda else memory_bytes()[0] / nproc,
        bytes_per_second=3 * sizes.memory / slowest["add",],
        copy_bytes_per_second=2 * sizes.memory / slowest["copy",],
        operator_seconds=slowest["operator",],
        operator_bytes_per_second={name: 1 / slowest["bytes", name] for name in OPERATORS},
        matmul={dtype: _products(slowest, dtype, sizes) for dtype in sizes.dtypes},
        attention={dtype: _attention(slowest, dtype, sizes) for dtype in sizes.dtypes},
        collectives=[
            table
            for operation in OPERATIONS
            for ranks in group_sizes(nproc)
            if (table := _collective(slowest, operation, ranks)) is not None
        ],
    )
    return calibrated(file, sizes.steps) if sizes.steps else file


def _products(slowest: Seconds, dtype: str, sizes: Sizes) -> ProductTable:
    rows = [[slowest["matmul", dtype, a, b] for b in sizes.matmul if b >= a] for a in sizes.matmul]
    return ProductTable(sizes=list(sizes.matmul), seconds=rows)


def _attention(slowest: Seconds, dtype: str, sizes: Sizes) -> AttentionTable:
    forward, backward = ([slowest[name, dtype, length] for length in sizes.lengths] for name in ("forward", "backward"))
    return AttentionTable(
        heads=sizes.heads,
        head_dim=sizes.head_dim,
        lengths=list(sizes.lengths),
        forward_seconds=forward,
        backward_seconds=backward,
    )


def _collective(slowest: Seconds, operation: str, ranks: int) -> CollectiveTable | None:
    points = sorted((case[2], seconds) for case, seconds in slowest.items() if case[:2] == (operation, ranks))
    if not points:
        return None
    sizes, seconds = zip(*points, strict=True)
    return CollectiveTable(operation=operation, ranks=ranks, bytes=list(map(int, sizes)), seconds=list(seconds))


# -- printing -------------------------------------------------------------------------------------------------


def tables(results: MeasuredFile) -> str:
    """Return all measurements as tables."""
    device = f"{results.name}, {counted(results.cores, 'core')}" if results.device == "cpu" else results.name
    together = f"{counted(results.ranks, 'rank')} at once, of {counted(results.threads, 'thread')} each"
    head = f"{device}: {together}, torch {results.torch}, {results.backend}"
    parts = [head]
    for dtype, products in results.matmul.items():
        parts.append(f"GFLOP/s of a rank in {dtype}, [a, b] x [b, b]\n{_product_rows(products)}")
    for dtype, attention in results.attention.items():
        parts.append(f"GFLOP/s of a rank in {dtype}, causal attention\n{_attention_rows(attention)}")
    parts.append(
        f"memory: {results.bytes_per_second / 1e9:.1f} GB/s in x + y, "
        f"{results.copy_bytes_per_second / 1e9:.1f} GB/s in a copy; "
        f"an operator has an overhead of {_time(results.operator_seconds)}"
    )
    parts.append(_operator_rows(results))
    if results.step_factor != 1.0:
        parts.append(
            f"in a training step operators take {results.step_factor:.2f} times as long as by these tables, and bytes "
            f"between ranks {results.traffic_factor:.2f} times"
        )
    for ranks in sorted({table.ranks for table in results.collectives}):
        of_size = [table for table in results.collectives if table.ranks == ranks]
        parts.append(f"{ranks} ranks, by the bytes of the whole tensor\n{_collective_rows(of_size)}")
    return "\n\n".join(parts)


def _product_rows(table: ProductTable) -> str:
    rows = [["a", *(f"b {size}" for size in table.sizes)]]
    seconds = table.by_pair()
    for a in table.sizes:
        cells = [_rate(2 * a * b * b / seconds[a, b]) if b >= a else "" for b in table.sizes]
        rows.append([str(a), *cells])
    return aligned(rows)


def _attention_rows(table: AttentionTable) -> str:
    rows = [["tokens", "forward", "backward"]]
    for length, forward, backward in zip(table.lengths, table.forward_seconds, table.backward_seconds, strict=True):
        flops = 2 * table.heads * length**2 * table.head_dim
        rows.append([str(length), _rate(flops / forward), _rate(2.5 * flops / backward)])
    return aligned(rows)


def _operator_rows(results: MeasuredFile) -> str:
    rates = results.operator_bytes_per_second.items()
    return aligned([["GB/s that it reads and writes", ""], *([name, f"{rate / 1e9:.1f}"] for name, rate in rates)])


def _collective_rows(tables_of_size: list[CollectiveTable]) -> str:
    rows = [["", *(table.operation for table in tables_of_size)]]
    for index, size in enumerate(tables_of_size[0].bytes):
        rows.append([byte_count(size), *(_time(table.seconds[index]) for table in tables_of_size)])
    links = [table.link() for table in tables_of_size]
    rows.append(["latency", *(_time(link.latency) for link in links)])
    rows.append(["bandwidth", *(f"{link.bandwidth / 1e9:.2f} GB/s" for link in links)])
    return aligned(rows, left_columns=[0])


def _rate(flops_per_second: float) -> str:
    billions = flops_per_second / 1e9
    return f"{billions:.1f}" if billions < 100 else f"{billions:,.0f}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
