"""A language model over words with large tables: words/s of the ways of their gradients, beside torch's DDP.

    python -m benchmarks.sparse_tables                             # 4 ranks on this host
    python -m benchmarks.sparse_tables --hosts 4 --rate 1gbit      # 4 hosts, as of benchmarks.hosts (needs root)
    python -m benchmarks.sparse_tables --vocabulary 100000 200000 400000 --methods owners "all_reduce, dense"

The model is WordsLM (an LSTM between tables of words, of pairs of words, and of a sampled softmax) on the source of
Python's standard library, one row of the tables for each word of a vocabulary: words that the text does not have are
rows that nobody touches. DDP runs the same layers in plain torch. All methods have the same initial values, batches,
negatives and optimizer (Adagrad), so their losses agree; the command fails if they do not. Columns:

    words/s        of all ranks together, over the median step
    MB/step        that a rank sends, as colossus counts it (rows and ids, and the dense rest)
    MB on wire     that leave the interface of a host, headers included
    tables MB      parameters and optimizer state of the tables that a rank holds
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

import colossus
from benchmarks import common
from benchmarks.host_ranks import machine_words, measure_each, run_on_hosts
from benchmarks.hosts import USAGE, make_hosts
from benchmarks.peers.words_ddp import WordsDDP
from benchmarks.replica_runs import bytes_on_wire
from colossus.comm import accounting
from colossus.config import ConfigError, load_config
from colossus.context.local_ranks import run_local_ranks
from colossus.data.make_loaders import loaders_of
from colossus.state.model_state_dict import full_state_dict

torch.sparse.check_sparse_tensor_invariants.disable()  # as it is by default; torch warns where nobody has said so

#: of `parallel.strategy`, or None for DDP with this ``sparse``
METHODS: dict[str, dict[str, Any] | bool] = {
    "hybrid": dict(type="hybrid"),
    "owners": dict(type="hybrid", ways={"*": "owners"}),
    "gathered rows": dict(type="hybrid", ways={"*": "gather"}),
    "all_reduce, dense": dict(type="all_reduce"),
    "DDP, dense": False,
    "DDP, sparse=True": True,
}
_WARM_UP = 2
#: the largest difference of the last losses, relative: float32 numbers are added in another order
_LOSS_TOLERANCE = 1e-4


@dataclass
class RankResult:
    """A method as one rank has seen it."""

    seconds: list[float]
    counted: float
    wire: float
    table_bytes: int
    losses: list[float]


@dataclass
class Row:
    """A method on a vocabulary; MB per step and rank."""

    method: str
    vocabulary: int
    words_per_second: float
    seconds: float
    counted: float | None
    wire: float
    table_mb: float
    loss: float


def config_of(arguments: argparse.Namespace, vocabulary: int, world: int) -> dict[str, Any]:
    """Return the config without its strategy."""
    model = dict(
        type="WordsLM", hidden_size=arguments.width, vocab_size=vocabulary, pairs=arguments.pairs,
        seq_len=arguments.seq_len, num_samples=arguments.samples, trunk="lstm",
    )  # fmt: skip
    return dict(
        parallel=dict(data=world),
        model=model,
        data=dict(type="PythonStdlibWords", pairs=arguments.pairs, max_bytes=arguments.max_bytes),
        optimizer=dict(type="Adagrad", lr=0.02),
        train=dict(steps=_WARM_UP + arguments.steps, global_batch_size=arguments.rows * world, seed=0),
        checkpoint=dict(dir=None),
        comm=dict(timeout_seconds=600.0),
        device="cpu",
    )


def measure(run: Callable[..., list[Any]], config: dict[str, Any], method: str, words: int) -> Row:
    kind = METHODS[method]
    body = partial(_ddp, config, kind) if isinstance(kind, bool) else partial(_ours, config, kind)
    results: list[RankResult] = run(body)
    seconds = statistics.median(results[0].seconds)
    counted = None if isinstance(kind, bool) else statistics.mean(of_rank.counted for of_rank in results) / 1e6
    return Row(
        method,
        config["model"]["vocab_size"],
        words / seconds,
        seconds,
        counted,
        max(of_rank.wire for of_rank in results) / 1e6,
        max(of_rank.table_bytes for of_rank in results) / 1e6,
        results[0].losses[-1],
    )


def _ours(config: dict[str, Any], strategy: dict[str, Any], rank: int) -> RankResult:
    parallel = {**config["parallel"], "strategy": strategy}
    engine = colossus.initialize({**config, "parallel": parallel})
    with accounting.count() as counter:
        result = _steps(
            config["train"]["steps"], engine.loader, lambda batch: engine.train_step(batch).loss, counter.bytes
        )
    tables = [table.param for table in engine.strategy.tables or ()]
    tensors = [x for table in tables for x in (table, *engine.optimizer.state[table].values())]
    result.table_bytes = sum(x.nbytes for x in tensors if isinstance(x, torch.Tensor))
    engine.close()
    return result


def _ddp(config: dict[str, Any], sparse: bool, rank: int) -> RankResult:
    world = int(os.environ["WORLD_SIZE"])
    engine = colossus.initialize(config)  # for the initial values
    start = full_state_dict(engine.model, engine.context)
    peer = WordsDDP(config["model"], config["optimizer"], start, sparse=sparse)
    loaded = load_config(config, nproc=world)
    loaders = loaders_of(loaded, loaded.data, data_rank=rank, data_size=world, device="cpu")
    result = _steps(config["train"]["steps"], loaders.train, peer.step, lambda: 0.0)
    result.table_bytes = peer.table_bytes
    engine.close()
    return result


def _steps(steps: int, loader: Any, step: Callable[[Any], float], counted: Callable[[], float]) -> RankResult:
    """Run steps on the batches of a loader; those of the warm-up are not timed."""
    result = RankResult([], 0.0, 0.0, 0, [])
    before, wire = 0.0, 0
    batches = iter(loader)
    for number in range(steps):
        if number == _WARM_UP:
            before, wire = counted(), bytes_on_wire()
        began = time.monotonic()
        result.losses.append(step(next(batches)))
        if number >= _WARM_UP:
            result.seconds.append(time.monotonic() - began)
    result.counted = (counted() - before) / (steps - _WARM_UP)
    result.wire = (bytes_on_wire() - wire) / (steps - _WARM_UP)
    return result


def report(rows: Sequence[Row], title: str) -> None:
    cells = []
    for row in rows:
        peers = {peer.method: peer.words_per_second for peer in rows if peer.vocabulary == row.vocabulary}

        def ratio(name: str, row: Row = row, peers: dict[str, float] = peers) -> str:
            return f"{row.words_per_second / peers[name]:.2f}" if name in peers else ""

        cells.append(
            (
                f"{row.vocabulary:,}",
                row.method,
                f"{row.seconds:.3f}",
                f"{row.words_per_second:,.0f}",
                ratio("all_reduce, dense"),
                ratio("DDP, dense"),
                ratio("DDP, sparse=True"),
                "" if row.counted is None else f"{row.counted:.2f}",
                f"{row.wire:.2f}" if row.wire else "",
                f"{row.table_mb:.1f}",
                f"{row.loss:.5f}",
            )
        )
    header = (
        *("rows", "method", "s/step", "words/s", "/ all_reduce", "/ DDP dense", "/ DDP sparse"),
        *("MB/step", "MB on wire", "tables MB", "loss"),
    )
    common.print_table(title, header, cells)


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.make_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="of this host (default %(default)s)")
    parser.add_argument("--hosts", type=int, default=0, help="one rank on each of so many shaped hosts instead")
    parser.add_argument("--rate", default="1gbit", help="of each host's link and direction (default %(default)s)")
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[100_000], help="rows of the tables of words")
    parser.add_argument("--pairs", type=int, default=65_536, help="rows of that of pairs of words; 0: none")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--samples", type=int, default=1024, help="negatives of a step (default %(default)s)")
    parser.add_argument("--rows", type=int, default=16, help="samples of a rank's batch (default %(default)s)")
    parser.add_argument("--seq-len", type=int, default=20, help="words of a sample (default %(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="that are timed (default %(default)s)")
    parser.add_argument("--max-bytes", type=int, default=None, help="of the text that is read (default: all)")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="METHOD")
    arguments = parser.parse_args(argv)
    world = arguments.hosts or arguments.ranks
    if world < 2 or arguments.steps < 1:
        parser.error("there are at least two ranks, and one step is timed")
    if arguments.smoke:
        arguments.vocabulary, arguments.pairs, arguments.width = [3000], 512, 16
        arguments.samples, arguments.rows, arguments.steps, arguments.max_bytes = 32, 2, 2, 200_000
    words = arguments.rows * arguments.seq_len * world
    began, rows, failed = time.monotonic(), list[Row](), False

    def run_all(run: Callable[..., list[Any]]) -> None:
        nonlocal failed
        for vocabulary in arguments.vocabulary:
            config = config_of(arguments, vocabulary, world)
            load_config(config, nproc=world)
            measured, some_failed = measure_each(
                "sparse_tables", arguments.methods, lambda method, config=config: measure(run, config, method, words)
            )
            rows.extend(measured)
            losses = [row.loss for row in measured]
            if losses and max(losses) - min(losses) > _LOSS_TOLERANCE * min(losses):
                print(f"sparse_tables: the losses of the methods differ: {losses}", file=sys.stderr)
                some_failed = True
            failed |= some_failed

    try:
        if arguments.hosts:
            with make_hosts(arguments.hosts, arguments.rate) as hosts:
                run_all(partial(run_on_hosts, hosts))
        else:
            run_all(partial(run_local_ranks, world))
    except (ConfigError, ValueError, RuntimeError, OSError) as error:
        print(f"sparse_tables: {error}", file=sys.stderr)
        return USAGE
    if not rows:
        return 1
    where = f"{world} hosts, {arguments.rate} per link" if arguments.hosts else f"{world} ranks on one host"
    report(rows, f"{where}, width {arguments.width}, {words:,} words a step, {arguments.samples} negatives")
    print(machine_words(began))
    common.write_json(arguments.json, {"where": where, "rows": [asdict(row) for row in rows]})
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
