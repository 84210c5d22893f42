"""The bubble of every schedule as it runs, beside what the simulator says.

    python -m benchmarks.bubble

The stages of the model sleep: on each rank a forward takes 100 ms and so do dgrad and wgrad, whatever the
number of stages on it (``--milliseconds``). Sleeping needs no processor, so ranks may outnumber cores. The bubble of a
rank is the share of the step (from the first action of any rank to the end of the last) in which it does not have
one of these known sleeps to do: what actions wait for is in the bubble, and so is all that the executor adds.

*simulated* knows the sleeps and nothing else. *with overhead* takes the durations of those actions of this run that had
nothing to wait for (forwards of the first stage, backwards of the last, weight gradients), and of the transfers beside
them. That includes how long after its time a loaded machine wakes a sleeping process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.bubble_stages import Played, Task, Worker, weight
from benchmarks.common import Spread
from benchmarks.ranks import RankGroup
from colossus.schedule.actions import COMPUTE
from colossus.schedule.build import make_schedule
from colossus.schedule.simulate import Simulation, simulate

#: schedule -> stages on each rank
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}
#: ranks, microbatches
SIZES = ((2, 4), (4, 8))


@dataclass
class Result:
    """A schedule as it ran, by repetition, and as simulated.

    Attributes:
        bubbles: mean over the ranks.
        peaks: activations in flight at most, by rank.
        with_overhead: the simulated bubble with durations of actions as measured.
    """

    task: Task
    bubbles: list[float]
    makespans: list[float]
    peaks: list[int]
    predicted: Simulation
    with_overhead: float

    @property
    def deviation(self) -> float:
        """Return the relative difference of the measured bubble from the simulated one."""
        return Spread.of(self.bubbles).median / self.predicted.bubble - 1.0


def measure(task: Task, repetitions: int) -> Result:
    """Run it.

    Raises:
        RuntimeError: when a rank does not run all of its list, or its gradients are not those of the model.
    """
    name = f"{task.schedule} on {task.ranks} ranks"
    actions = make_schedule(task.schedule, task.ranks, task.microbatches)
    with RankGroup(name, task.ranks, partial(Worker, task)) as group:
        group.call("play")  # stages send the specs of their values
        check_gradients(task, group.call("gradients"))
        runs: list[list[Played]] = [group.call("play") for _ in range(repetitions)]
    for rank, own in enumerate(actions):
        if any([span[0] for span in run[rank].spans] != own for run in runs):
            raise RuntimeError(f"{name}: rank {rank} did not run its list")
    played = [_bubble_of(task, run) for run in runs]
    return Result(
        task,
        [bubble for bubble, _ in played],
        [makespan for _, makespan in played],
        [max(run[rank].peak for run in runs) for rank in range(task.ranks)],
        simulate(actions, task.times),
        _with_overhead(task, runs),
    )


def check_gradients(task: Task, by_rank: Sequence[dict[str, Any]]) -> None:
    """Raise RuntimeError unless every stage has the gradient of its weight, also where that was deferred.

    Raises:
        RuntimeError: the names of the stages that do not.
    """
    gradients = {name: value for own in by_rank for name, value in own.items()}
    stages = task.ranks * task.chunks
    wanted = task.microbatches * weight().numpy() ** (stages - 1)
    names = [f"{stage}.weight" for stage in range(stages)]
    wrong = [name for name in names if name not in gradients or not np.allclose(gradients[name], wanted, rtol=1e-5)]
    if wrong:
        raise RuntimeError(f"{task.schedule} on {task.ranks} ranks: no gradient, or a wrong one, of {', '.join(wrong)}")


def _with_overhead(task: Task, runs: Sequence[Sequence[Played]]) -> float:
    """Return the simulated bubble when actions take as long as those that had nothing to wait for, with transfers."""
    actions = make_schedule(task.schedule, task.ranks, task.microbatches)
    last = task.ranks * task.chunks - 1
    ends = {"forward": 0, "backward": last, "backward_input": last}
    took: dict[str, list[float]] = {}
    for span in (span for run in runs for played in run for span in played.spans):
        action, began, ended = span
        if action.kind not in ends or action.stage == ends[action.kind]:
            took.setdefault(action.kind, []).append(ended - began)
    typical = {kind: median(values) for kind, values in took.items()}
    sleeps = asdict(task.times)
    transfers = sum(typical.get(kind, 0.0) for kind in ("send_activation", "receive_activation"))
    durations = {kind: typical.get(kind, sleeps[kind]) + (transfers if kind in ends else 0.0) for kind in COMPUTE}
    makespan = simulate(actions, replace(task.times, **durations)).makespan
    return mean(1.0 - sum(map(task.times.of, (a for a in own if a.kind in COMPUTE))) / makespan for own in actions)


def _bubble_of(task: Task, run: Sequence[Played]) -> tuple[float, float]:
    """Return bubble and makespan of one repetition."""
    begin = min(played.spans[0][1] for played in run)
    end = max(played.spans[-1][2] for played in run)
    busy = [sum(task.times.of(span[0]) for span in played.spans if span[0].kind in COMPUTE) for played in run]
    return mean(1.0 - own / (end - begin) for own in busy), end - begin


# -- results --------------------------------------------------------------------------------------------------


def report(results: Sequence[Result]) -> None:
    """Print a table for each size."""
    for ranks, microbatches in dict.fromkeys((r.task.ranks, r.task.microbatches) for r in results):
        own = [r for r in results if (r.task.ranks, r.task.microbatches) == (ranks, microbatches)]
        header = (
            "schedule", "bubble", "simulated", "off by", "with overhead", "step, s", "simulated", "off by",
            "in flight", "simulated",
        )  # fmt: skip
        rows = [
            (
                r.task.schedule,
                Spread.of(r.bubbles),
                f"{r.predicted.bubble:.3f}",
                f"{100 * r.deviation:+.1f} %",
                f"{r.with_overhead:.3f}",
                f"{Spread.of(r.makespans).median:.3f}",
                f"{r.predicted.makespan:.3f}",
                f"{100 * (Spread.of(r.makespans).median / r.predicted.makespan - 1.0):+.1f} %",
                _listed(r.peaks),
                _listed(r.predicted.peaks),
            )
            for r in own
        ]
        milliseconds = 1e3 * own[0].task.seconds
        title = f"{ranks} ranks, {microbatches} microbatches, forward {milliseconds:g} ms; {len(own[0].bubbles)} steps"
        common.print_table(title, header, rows)
        limits = _listed([min(ranks - rank, microbatches) for rank in range(ranks)])
        print(
            f"  bubble: mean over the ranks, median [quartiles] over steps; min(stages - rank, microbatches): {limits}"
        )


def _listed(counts: Sequence[int]) -> str:
    return " ".join(map(str, counts))


def as_json(result: Result) -> dict[str, Any]:
    return {
        **asdict(result.task),
        "bubbles": result.bubbles,
        "bubble": asdict(Spread.of(result.bubbles)),
        "simulated_bubble": result.predicted.bubble,
        "deviation": result.deviation,
        "with_overhead": result.with_overhead,
        "makespans": result.makespans,
        "simulated_makespan": result.predicted.makespan,
        "peaks": result.peaks,
        "simulated_peaks": result.predicted.peaks,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.make_parser(__doc__, blocks=3)
    parser.add_argument("--milliseconds", type=float, default=100.0, help="of a forward (default %(default)s)")
    parser.add_argument(
        "--schedules", nargs="+", choices=list(SCHEDULES), default=list(SCHEDULES), help="(default: all)"
    )
    arguments = parser.parse_args(argv)
    sizes, blocks = (SIZES[:1], 1) if arguments.smoke else (SIZES, arguments.blocks)
    results = []
    for ranks, microbatches in sizes:
        for name in arguments.schedules:
            common.progress(f"{name} on {ranks} ranks")
            task = Task(name, ranks, microbatches, SCHEDULES[name], arguments.milliseconds * 1e-3)
            results.append(measure(task, blocks))
    common.progress("")
    report(results)
    common.write_json(arguments.json, {"results": [as_json(result) for result in results]})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
