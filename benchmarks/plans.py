"""The planner's predictions of the train step of plans, beside what it takes here.

    python -m benchmarks.plans

The ranks have one thread each. What this machine does is measured first (`colossus doctor --measure --nproc 8`), then
the step of each plan, in groups of a few plans that take turns with a reference, so that the times of all are told over
that one. Printed are both times of each plan, their rank correlation (Spearman), and how far the plan that is predicted
to be the fastest is from the one that was: of all, and of those of four ranks, among which is then the planner's own
choice of all that fit, as the last plan.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from benchmarks import common
from benchmarks.common import Spread
from colossus.compare.timed_plan import TimedPlan, one_thread
from colossus.config import Config, load_config
from colossus.config.overrides import plan_overrides
from colossus.config.plans import world_size
from colossus.doctor.measure import measure_ranks
from colossus.doctor.timing_sizes import ON_CPU
from colossus.hardware.measured import Measured, MeasuredFile
from colossus.planner.estimate import Estimator
from colossus.planner.search import search

FILE = "configs/gpt_stdlib.py"
REFERENCE = "data=2"
PLANS = (
    REFERENCE,
    "data=1",
    "tensor=2",
    "sequence=2",
    "pipeline=2 schedule.microbatches=2",
    "pipeline=2 schedule.microbatches=8",
    "data=2 zero=3 schedule.microbatches=2",
    "data=2 train.activation_checkpoint=full",
    "data=4",
    "data=2 tensor=2",
    "tensor.size=4 tensor.sequence_sharded=True",
    "tensor.mode=2d tensor.size=4",
    "data=2 pipeline=2 schedule.microbatches=4",
    "pipeline=4 schedule.microbatches=8",
    "data=4 zero=3 schedule.microbatches=4",
    "data=2 sequence.size=2 sequence.mode=ulysses",
    "data=8",
    "data=2 tensor=2 pipeline=2 schedule.microbatches=4",
    "tensor.mode=3d tensor.size=8",
    "sequence=4 data=2",
    "data=2 zero=1",
    "data=2 zero=2 schedule.microbatches=4",
    "data=4 zero.stage=3 zero.shard=2",
    "tensor.size=2 tensor.sequence_sharded=True train.activation_checkpoint=selective",
    "tensor=4",
    "tensor.mode=2d tensor.size=4 tensor.weights=step",
    "tensor.mode=2.5d tensor.size=8 tensor.depth=2",
    "pipeline=2 schedule.type=zb-h1 schedule.microbatches=4",
    "pipeline=2 schedule.type=interleaved schedule.chunks=2 schedule.microbatches=4",
    "sequence=4",
)
#: of what a machine is measured at where it is only to run
SMOKE = replace(ON_CPU, matmul=(8, 64), lengths=(32, 64), messages=(1 << 10, 1 << 16), seconds=0.0, steps=1)
OWN = ("checkpoint.every=0", "train.eval_every=0")
#: of a plan; and of those of a group together, which are all there while one of them runs: each waits in a few threads
#: of gloo, which wake up a hundred times a second
MOST_RANKS, RANKS_OF_GROUP = 8, 8
DEVICES = 4


def overrides_of(plan: str, overrides: Sequence[str]) -> list[str]:
    return [*overrides, *plan_overrides(plan), *OWN]


def configs_of(plans: Sequence[str], overrides: Sequence[str]) -> dict[str, Config]:
    return {plan: load_config(FILE, overrides_of(plan, overrides)) for plan in plans}


# -- measured -------------------------------------------------------------------------------------------------


def groups_of(configs: Mapping[str, Config]) -> list[list[str]]:
    """Return groups of plans whose ranks together are few, without the reference."""
    groups: list[list[str]] = [[]]
    for plan, config in configs.items():
        if plan == REFERENCE:
            continue
        ranks = sum(world_size(configs[other].parallel) for other in groups[-1]) + world_size(config.parallel)
        if groups[-1] and ranks > RANKS_OF_GROUP:
            groups.append([])
        groups[-1].append(plan)
    return groups


def time_plans(
    configs: Mapping[str, Config], overrides: Sequence[str], blocks: int, steps: int
) -> dict[str, list[float]]:
    """Return seconds of a step of each plan by block: over those of the reference there, times its median."""
    over: dict[str, list[float]] = {}
    references: list[float] = []
    for group in groups_of(configs):
        timed = {
            plan: TimedPlan(plan, FILE, overrides_of(plan, overrides), configs[plan]) for plan in (REFERENCE, *group)
        }
        with ExitStack() as stack:
            for plan in timed.values():
                plan.start(stack, warmup=2)
            series = common.alternate({name: partial(plan.block, steps) for name, plan in timed.items()}, blocks)
        failed = [name for name, plan in timed.items() if plan.measured.failure is not None]
        if failed:
            raise SystemExit(f"these failed: {', '.join(failed)}")
        references += series[REFERENCE]
        over |= {
            plan: [one / other for one, other in zip(series[plan], series[REFERENCE], strict=True)] for plan in group
        }
    seconds = statistics.median(references)
    return {REFERENCE: references} | {plan: [ratio * seconds for ratio in ratios] for plan, ratios in over.items()}


# -- predicted ------------------------------------------------------------------------------------------------


def predict(configs: Mapping[str, Config], hardware: Measured) -> dict[str, float]:
    """Return the predicted seconds of a step of each plan."""
    estimator = Estimator(hardware)
    return {plan: estimator.estimate(config).seconds for plan, config in configs.items()}


def choice(hardware: Measured, overrides: Sequence[str]) -> str:
    """Return the plan that ``colossus plan --devices 4`` has at the top, as its text."""
    config = load_config(FILE, [*overrides, *OWN], DEVICES)
    return " ".join(search(config, hardware, devices=DEVICES, top=1).plans[0].overrides)


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's correlation of numbers that are all different."""
    ranks = [[sorted(values).index(value) for value in values] for values in (one, other)]
    return statistics.correlation(*ranks)


# -- all of it ------------------------------------------------------------------------------------------------


def report(predicted: Mapping[str, float], measured: Mapping[str, list[float]], ranks: Mapping[str, int]) -> None:
    medians = {plan: Spread.of(times).median for plan, times in measured.items()}
    rows: list[list[Any]] = []
    for plan in sorted(medians, key=medians.__getitem__):
        spread = Spread.of([1e3 * seconds for seconds in measured[plan]])
        spread_text = f"{spread.median:.1f} [{spread.low:.1f}, {spread.high:.1f}]"
        both = [f"{1e3 * predicted[plan]:.1f}", spread_text, f"{predicted[plan] / medians[plan]:.2f}"]
        rows.append([plan, ranks[plan], *both])
    header = ["plan", "ranks", "predicted ms", "measured ms", "predicted / measured"]
    common.print_table("a step of each plan, the fastest first", header, rows)
    plans = list(medians)
    listed = [plan for plan in PLANS if plan in medians]
    correlation = rank_correlation([predicted[plan] for plan in listed], [medians[plan] for plan in listed])
    print(f"\n  rank correlation over {len(listed)} plans: {correlation:.3f}")
    of_devices = [plan for plan in plans if ranks[plan] == DEVICES]
    for name, among in {"all": plans, f"{DEVICES} ranks": of_devices or plans}.items():
        chosen, best = (min(among, key=lambda plan: of[plan]) for of in (predicted, medians))
        print(
            f"  of {name}: predicted to be the fastest {chosen!r}, which takes {medians[chosen] / medians[best]:.3f} "
            f"of the fastest's time, {best!r}"
        )


def main() -> None:
    parser = common.make_parser(__doc__, blocks=5)
    parser.add_argument("--steps", type=int, default=4, help="of a block (default %(default)s)")
    parser.add_argument("--hardware", type=Path, metavar="FILE", help="measured before, by colossus doctor --measure")
    parser.add_argument("overrides", nargs="*", help=f"for all plans of {FILE}, for example model.hidden_size=256")
    args = parser.parse_args()
    blocks, steps = (1, 1) if args.smoke else (args.blocks, args.steps)
    overrides: list[str] = args.overrides
    one_thread()
    if args.hardware is None:
        file = measure_ranks(2, "cpu", SMOKE) if args.smoke else measure_ranks(MOST_RANKS, "cpu", ON_CPU)
    else:
        file = MeasuredFile.model_validate_json(args.hardware.read_text())
    hardware = Measured(file)
    plans = list(PLANS[:4]) if args.smoke else [*PLANS, choice(hardware, overrides)]
    configs = configs_of(plans, overrides)
    predicted = predict(configs, hardware)
    measured = time_plans(configs, overrides, blocks, steps)
    common.write_json(args.json, {"predicted": predicted, "measured": measured, "hardware": file.model_dump()})
    report(predicted, measured, {plan: world_size(config.parallel) for plan, config in configs.items()})


if __name__ == "__main__":
    main()
