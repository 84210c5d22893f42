"""Replicas of which one is slow: how much of its own speed every other keeps, under each data-parallel strategy.

    python -m benchmarks.stragglers

A step's compute is a sleep (of a tiny model), so that cores do not matter. Three kinds of run: nobody is slow; one
replica always is; in each step another replica, drawn at random, is. What is printed for a strategy is the speed of the
replicas that are not always slow, over the speed that each would have if it waited for nobody: the sum of its own
sleeps, and what a step costs beside them where nobody is slow. `predicted` is the same of a model in which only
waiting counts: a replica's step ends when its compute has, and the messages that are due are there.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks import common, ranks  # noqa: F401  ranks: one thread before the first operation
from benchmarks.host_ranks import machine_words
from benchmarks.replica_runs import RankRun, strategy_of, train
from colossus.config import ConfigError, load_config
from colossus.context.local_ranks import run_local_ranks
from colossus.graphs.graph import make_graph

STRATEGIES = (
    "all_reduce", "sgp", *(f"sgp overlap={steps}" for steps in (1, 2, 4)), "ad-psgd", "server", "server mode=async",
    "server mode=async max_staleness=4",
)  # fmt: skip
SLOW_REPLICA = 1
_WARM_UP = 2


#: kind of run -> the replica that is slow in a step
KINDS: dict[str, Callable[[int, int], int | None]] = {
    "nobody": lambda step, replicas: None,
    "always the same": lambda step, replicas: SLOW_REPLICA,
    "another each step": lambda step, replicas: random.Random(step).randrange(replicas),
}


def config(strategy: str, replicas: int, steps: int) -> dict[str, Any]:
    return dict(
        parallel=dict(data=replicas, strategy=strategy_of(strategy)),
        model=dict(type="GPT", num_layers=1, hidden_size=16, num_heads=2, vocab_size=256, seq_len=8),
        data=dict(type="PythonStdlib"),
        optimizer=dict(type="SGD", lr=1e-3),
        train=dict(steps=steps, global_batch_size=replicas, seed=0, eval_every=0),
        checkpoint=dict(dir=None),
        comm=dict(timeout_seconds=120.0),
        device="cpu",
    )


def sleeps(kind: str, replica: int, replicas: int, steps: range, base: float, factor: float) -> list[float]:
    """Return the seconds of compute of a replica in each of these steps (from 0)."""
    return [base * (factor if KINDS[kind](step, replicas) == replica else 1.0) for step in steps]


def seconds_per_step(strategy: str, kind: str, replicas: int, steps: int, base: float, factor: float) -> list[float]:
    """Return those of each replica, behind the first steps and before the last, after which all wait for each other."""
    total = _WARM_UP + steps + 1

    def body(rank: int) -> RankRun:
        own = sleeps(kind, rank, replicas, range(total), base, factor)
        return train(config(strategy, replicas, total), lambda step: time.sleep(own[step]))

    runs: list[RankRun] = run_local_ranks(replicas, body, patience=120.0)
    return [run.seconds_per_step(_WARM_UP, _WARM_UP + steps) for run in runs]


def share_kept(measured: Sequence[float], kind: str, steps: int, overhead: float, base: float, factor: float) -> float:
    """Return the speed of the replicas that are not always slow, over that if they waited for nobody; their mean."""
    replicas, shares = len(measured), []
    for replica, seconds in enumerate(measured):
        if kind == "always the same" and replica == SLOW_REPLICA:
            continue
        own = sleeps(kind, replica, replicas, range(_WARM_UP, _WARM_UP + steps), base, factor)
        shares.append((sum(own) / len(own) + overhead) / seconds)
    return sum(shares) / len(shares)


def predicted(strategy: str, kind: str, replicas: int, steps: int, factor: float) -> float | None:
    """Return `share_kept` of a model in which messages travel in no time; None for what it does not cover."""
    options = strategy_of(strategy)
    if options["type"] == "server" and options.get("mode") == "async":
        return 1.0 if options.get("max_staleness") is None else None
    if options["type"] in ("all_reduce", "server"):
        graph, overlap = make_graph("complete", replicas, replicas - 1), 0
    elif options["type"] == "sgp":
        graph = make_graph(options.get("graph", "exponential"), replicas, options.get("peers", 1))
        overlap = options.get("overlap", 0)
    else:
        return None
    total = _WARM_UP + steps
    own = [sleeps(kind, replica, replicas, range(total), 1.0, factor) for replica in range(replicas)]
    ends, computed = [[0.0] * replicas], []
    for step in range(total):
        computed.append([ends[-1][replica] + own[replica][step] for replica in range(replicas)])
        sent = step - overlap
        awaited = [graph.at(sent).sources(replica) if sent >= 0 else [] for replica in range(replicas)]
        due = [[computed[sent][source] for source in sources] for sources in awaited]
        ends.append([max([computed[-1][replica], *due[replica]]) for replica in range(replicas)])
    return share_kept(
        [(ends[-1][i] - ends[_WARM_UP][i]) / steps for i in range(replicas)], kind, steps, 0.0, 1.0, factor
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.make_parser(__doc__)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--steps", type=int, default=48, help="timed in each run (default %(default)s)")
    parser.add_argument("--base", type=float, default=0.1, help="seconds of a step's compute (default %(default)s)")
    parser.add_argument("--factor", type=float, default=3.0, help="of who is slow (default %(default)s)")
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), metavar="'NAME KEY=VALUE'")
    arguments = parser.parse_args(argv)
    if arguments.replicas < 2 or arguments.steps < 1:
        parser.error("there are at least two replicas, and one step is timed")
    if arguments.smoke:
        arguments.steps, arguments.base = 4, 0.01
    try:
        for strategy in arguments.strategies:
            load_config(config(strategy, arguments.replicas, _WARM_UP + arguments.steps + 1))
    except ConfigError as error:
        print(f"stragglers: {error}", file=sys.stderr)
        return 2
    began = time.monotonic()
    measured: dict[str, dict[str, list[float]]] = {}
    for strategy in arguments.strategies:
        measured[strategy] = {}
        for kind in KINDS:
            common.progress(f"{time.monotonic() - began:4.0f} s  {strategy}, slow: {kind}")
            run = partial(seconds_per_step, strategy, kind, arguments.replicas, arguments.steps)
            measured[strategy][kind] = run(arguments.base, arguments.factor)
    common.progress("")
    rows, shares = [], {}
    for strategy, of_kind in measured.items():
        overhead = sum(of_kind["nobody"]) / arguments.replicas - arguments.base
        share_of = partial(
            share_kept, steps=arguments.steps, overhead=overhead, base=arguments.base, factor=arguments.factor
        )
        shares[strategy] = {kind: share_of(of_kind[kind], kind) for kind in KINDS if kind != "nobody"}
        cells = []
        for kind, share in shares[strategy].items():
            model = predicted(strategy, kind, arguments.replicas, arguments.steps, arguments.factor)
            cells += [f"{share:.3f}", "" if model is None else f"{model:.3f}"]
        rows.append((strategy, f"{overhead * 1e3:.1f}", *cells))
    title = f"{arguments.replicas} replicas, {arguments.base:g} s of compute a step, {arguments.factor:g}x when slow"
    named = [name for kind in KINDS if kind != "nobody" for name in (kind, "predicted")]
    common.print_table(title, ("strategy", "ms beside it", *named), rows)
    print(machine_words(began))
    common.write_json(arguments.json, {"seconds_per_step": measured, "share_kept": shares})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
