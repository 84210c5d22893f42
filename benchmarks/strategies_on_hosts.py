"""Data-parallel strategies on hosts whose links are slow: tokens/s over all-reduce's, bytes, loss after equal time.

    python -m benchmarks.strategies_on_hosts --hosts 4 --rate 100mbit
    python -m benchmarks.strategies_on_hosts --hosts 4 --rate 1gbit --seconds 60 --strategies all_reduce sgp

Each host is a replica of a GPT of about 10 M parameters; hosts and links are those of `benchmarks.hosts` (needs root
and iproute2). The tokens of a step are few, so that two cores are enough and the network is what is measured: the
ratios are those of a network-bound run. Bytes are counted by colossus, and by the interface of the host.

Tokens/s are of all replicas together, over steps of each replica's own behind the first: at least --steps of them and
whole rounds of the strategies that average after a round. With --seconds every strategy then trains anew for as many
steps as it makes in that time, and the average of the replicas is evaluated.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from benchmarks import common
from benchmarks.host_ranks import machine_words, measure_each, run_on_hosts
from benchmarks.hosts import USAGE, Host, make_hosts
from benchmarks.replica_runs import RankRun, rate, strategy_of, train
from colossus.config import ConfigError, load_config

STRATEGIES = (
    "all_reduce", "all_reduce compress=bf16", "all_reduce compress=powersgd start_step=1", "sgp", "sgp overlap=1",
    "d-psgd", "ad-psgd", "local_sgd", "slowmo", "diloco",
)  # fmt: skip
SEQ_LEN, ROWS = 32, 2
"""Of a replica's batch."""

MODEL = dict(type="GPT", num_layers=8, hidden_size=320, num_heads=8, vocab_size=256, seq_len=SEQ_LEN)
SMOKE_MODEL = dict(type="GPT", num_layers=1, hidden_size=32, num_heads=4, vocab_size=256, seq_len=SEQ_LEN)
#: steps of a round where a strategy does not say it
_PERIODS = {"local_sgd": 8, "slowmo": 8, "diloco": 30}
_WARM_UP = 1


@dataclass
class Row:
    """A strategy and what was measured.

    Attributes:
        steps: of each replica, over which it was measured.
        tokens_per_second: of all replicas together.
        counted, wire: MB sent per step and rank; of the wire with all headers that the interface counts.
        waited: seconds per step in which a replica waited for peers, as its strategy says; NaN where it does not.
        slowest, fastest: seconds per step of the replicas.
        equal_time_steps, equal_time_loss: of the second run, for which a time is given.
    """

    strategy: str
    steps: int
    tokens_per_second: float
    counted: float
    wire: float
    waited: float
    slowest: float
    fastest: float
    parameters: int
    equal_time_steps: int | None = None
    equal_time_loss: float | None = None


def config(strategy: str, replicas: int, steps: int, model: dict[str, Any], *, evaluates: bool) -> dict[str, Any]:
    return dict(
        parallel=dict(data=replicas, strategy=strategy_of(strategy)),
        model=model,
        data=dict(type="PythonStdlib"),
        optimizer=dict(type="AdamW", lr=1e-3, weight_decay=0.1),
        train=dict(
            steps=steps, global_batch_size=ROWS * replicas, clip_grad_norm=1.0, seed=0,
            eval_every=steps if evaluates else 0, eval_batches=8,
        ),
        checkpoint=dict(dir=None),
        comm=dict(timeout_seconds=300.0),
        device="cpu",
    )  # fmt: skip


def period(strategy: str) -> int:
    """Return the steps of a round."""
    options = strategy_of(strategy)
    return int(options.get("period", _PERIODS.get(options["type"], 1)))


def _timed(strategy: str, steps: int) -> int:
    """Return whole rounds of at least so many steps."""
    return math.ceil(steps / period(strategy)) * period(strategy)


def expected_bytes(strategy: str, replicas: int, parameters: int) -> float | None:
    """Return the bytes that a rank sends in a step, without scalars; None where they depend on the run."""
    options = strategy_of(strategy)
    size, ring = 4.0 * parameters, 2.0 * (replicas - 1) / replicas
    if options["type"] == "all_reduce":
        return {None: ring * size, "bf16": ring * size / 2, "fp16": ring * size / 2}.get(options.get("compress"))
    if options["type"] in ("sgp", "d-psgd"):
        return float(options.get("peers", 1)) * size
    if options["type"] in _PERIODS:
        return ring * size / period(strategy)
    return None


def measure(hosts: Sequence[Host], strategy: str, steps: int, model: dict[str, Any], seconds: float) -> Row:
    """Run a strategy on the hosts; where ``seconds`` is not 0, run it again for as many steps as it makes in them."""
    steps = _timed(strategy, steps)
    # one more behind those that are timed: after the last all replicas wait for each other
    plan = config(strategy, len(hosts), _WARM_UP + steps + 1, model, evaluates=False)
    runs: list[RankRun] = run_on_hosts(hosts, partial(_body, plan))
    first, last = _WARM_UP, _WARM_UP + steps
    times = [run.seconds_per_step(first, last) for run in runs]
    tokens = ROWS * SEQ_LEN * rate(runs, first, last)

    def mean(name: str) -> float:
        return sum(run.per_step(name, first, last) for run in runs) / len(runs)

    row = Row(
        strategy, steps, tokens, mean("counted") / 1e6, mean("wire") / 1e6, mean("waited"), max(times), min(times),
        runs[0].parameters,
    )  # fmt: skip
    if seconds:
        row.equal_time_steps = max(1, int(seconds * len(hosts) / sum(times)))
        plan = config(strategy, len(hosts), row.equal_time_steps, model, evaluates=True)
        row.equal_time_loss = run_on_hosts(hosts, partial(_body, plan))[0].validation_loss
    return row


def _body(plan: dict[str, Any], rank: int) -> RankRun:
    return train(plan)


def report(rows: Sequence[Row], replicas: int, rate_of_links: str, seconds: float) -> None:
    reference = next((row for row in rows if row.strategy == "all_reduce"), None)
    cells = []
    for row in rows:
        expected = expected_bytes(row.strategy, replicas, row.parameters)
        cells.append(
            (
                row.strategy,
                f"{row.slowest:.3f}",
                f"{row.tokens_per_second:.0f}",
                f"{row.tokens_per_second / reference.tokens_per_second:.2f}" if reference else "",
                f"{row.counted:.2f}",
                "" if expected is None else f"{expected / 1e6:.2f}",
                f"{row.wire:.2f}",
                f"{row.wire / reference.wire:.3f}" if reference else "",
                f"{row.waited:.3f}" if row.waited else "",
                *([row.equal_time_steps, f"{row.equal_time_loss or math.nan:.4f}"] if seconds else []),
            )
        )
    header = (
        *("strategy", "s/step", "tokens/s", "/ all_reduce", "MB/step", "expected", "MB on the wire", "/ all_reduce"),
        *("waited s", *([f"steps in {seconds:g} s", "loss then"] if seconds else [])),
    )
    title = f"{replicas} hosts, {rate_of_links} per link, {rows[0].parameters / 1e6:.1f} M parameters"
    common.print_table(title, header, cells)


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.make_parser(__doc__)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="100mbit", help="of each link and direction (default %(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="at least so many are timed (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.0, help="of training, after which losses are compared")
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), metavar="'NAME KEY=VALUE'")
    arguments = parser.parse_args(argv)
    if arguments.hosts < 2 or arguments.steps < 1:
        parser.error("there are at least two hosts, and one step is timed")
    model = SMOKE_MODEL if arguments.smoke else MODEL
    began = time.monotonic()
    try:
        for strategy in arguments.strategies:
            steps = _timed(strategy, arguments.steps)
            load_config(config(strategy, arguments.hosts, _WARM_UP + steps + 1, model, evaluates=False))
        with make_hosts(arguments.hosts, arguments.rate) as hosts:
            run = partial(measure, hosts, steps=arguments.steps, model=model, seconds=arguments.seconds)
            rows, failed = measure_each("strategies_on_hosts", arguments.strategies, run)
    except (ConfigError, ValueError, RuntimeError, OSError) as error:
        print(f"strategies_on_hosts: {error}", file=sys.stderr)
        return USAGE
    if not rows:
        return 1
    report(rows, arguments.hosts, arguments.rate, arguments.seconds)
    print(machine_words(began))
    settings = {name: getattr(arguments, name) for name in ("hosts", "rate", "seconds")}
    common.write_json(arguments.json, {**settings, "rows": [asdict(row) for row in rows]})
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
